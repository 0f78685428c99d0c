/* Sizes of a class of shapes: computes what formulas (ir/formulas.py) say, and writes it into launch tables.

Stands behind the texts of launch_table.c and pool.c. Python calls it while it holds its lock: it takes some microseconds.
*/

typedef int i32;

struct formulas {
  i64 first;              /* values that are known: symbols and constants; each function makes the next one */
  i64 functions, guarded; /* how many there are; so many come before the guards of the class are asked */
  i64 checks, guards;     /* how many there are; so many are of the class, the others are of scopes */
  const i32* code;        /* function, left and right operand */
  const i32* check;       /* 1: is it zero, 0: is it negative; the value; what it must answer; the scope */
};
enum { FAILS = -1, OVERFLOW = -2 };

/* One function as Python computes it. Answers FAILS for a division by zero, OVERFLOW where 64 bits are not enough. */
static int formula(i32 function, i64 a, i64 b, i64* made) {
  switch (function) {
    case ADD: return __builtin_add_overflow(a, b, made) ? OVERFLOW : 0;
    case MULTIPLY: return __builtin_mul_overflow(a, b, made) ? OVERFLOW : 0;
    case LEAST: *made = a < b ? a : b; return 0;
    case MOST: *made = a > b ? a : b; return 0;
  }
  if (!b) return FAILS;
  if (b == -1) { /* the least number has no negative */
    *made = 0;
    return function == DIVIDE && __builtin_sub_overflow((i64)0, a, made) ? OVERFLOW : 0;
  }
  i64 rest = a % b, down = rest && (rest < 0) != (b < 0);
  *made = function == DIVIDE ? a / b - down : rest + (down ? b : 0);
  return 0;
}

static int holds(const i32* check, const i64* values) {
  i64 value = values[check[1]];
  return (check[0] ? value == 0 : value < 0) == check[2];
}

/* Computes every value. Answers how many guards of scopes fail, whose scopes are then marked behind the values; FAILS
   where one of the class fails; OVERFLOW where Python must compute. */
EXPORT i64 formulas_compute(const struct formulas* f, i64* values) {
  i64* made = values + f->first;
  i64* failing = made + f->functions;
  for (i64 k = 0; k < f->functions; k++) {
    const i32* code = f->code + 3 * k;
    int wrong = formula(code[0], values[code[1]], values[code[2]], made + k);
    if (wrong == OVERFLOW || (wrong && k < f->guarded)) return wrong;
    if (wrong) made[k] = 0; /* the guards of its scope fail */
    if (k + 1 != f->guarded) continue;
    for (i64 c = 0; c < f->guards; c++) if (!holds(f->check + 4 * c, values)) return FAILS;
  }
  if (!f->guarded) for (i64 c = 0; c < f->guards; c++) if (!holds(f->check + 4 * c, values)) return FAILS;
  i64 count = 0;
  for (i64 c = f->guards; c < f->checks; c++) {
    if (holds(f->check + 4 * c, values)) continue;
    failing[f->check[4 * c + 3]] = 1;
    count++;
  }
  return count;
}

/* Writes values, each with a base added. words: the place in the table, the value and the base of each. */
EXPORT void formulas_write(u64* table, const i32* words, i64 count, const u64* values, const u64* bases) {
  for (i64 k = 0; k < count; k++, words += 3) table[words[0]] = values[words[1]] + bases[words[2]];
}
