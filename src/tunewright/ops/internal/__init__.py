"""Operations that only the IR has: passes make them, models never contain them."""
