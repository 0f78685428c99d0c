/* Tables of kernel steps and control rows: what the thread pool (pool.c) runs.

The table (64-bit words):  count of steps, participants at most, then for each step where its row begins; a row is
    entry point, x, y, items, cost (ticks for 1024 items, about the least that was seen; 0: unknown), arguments...
or, where the first word is one of these small numbers, a control row. Whoever begins the next step carries it out, so no
kernel runs meanwhile. "step" is the number of a step, any other operand the number of a word of the table:
    MOVE    source, sum, count, words...     writes table[source] + sum to each of the words. It moves the addresses among
                                             a body's arguments: to the next row (sum), to the other buffer of a state
    COPY    to, from, bytes                  copies memory; both words hold addresses
    JUMP    step
    UNLESS  step, condition                  jumps where the byte whose address is in table[condition] is 0
    LOOP    step, counter, limit, condition, left, whole, times
                                             is in front of a body, and jumps behind it: where table[counter] has reached
                                             the i64 at the address in table[limit] (no limit where that number is 0), or
                                             the byte at the address in table[condition] is 0. Each iteration takes one from
                                             table[left]. Where nothing is left, or `whole` is 1 and less is left than the
                                             loop will need, the run ends, and table[left + 1] is 1 + the loop's step.
                                             `times` is written when a loop ends: how long it was
    AGAIN   step, counter                    ends a body: adds one to table[counter] and jumps to its LOOP
    COMPUTE left, count, (function, to, a, b)...
                                             carries out so many functions of words, as signed numbers, which are written to
                                             words: sizes, offsets and arguments that change from one iteration to the next.
                                             IS_ZERO and IS_NEGATIVE compare the answer with `to`: where it is another one,
                                             the run ends, and table[left + 1] is 1 + the step
A table's own words are the variables of its loops: a counter's address can be an argument of kernels. Steps that are
not part of a loop initialise them, so that a run that is given up can begin anew.
*/

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;

extern void* memcpy(void*, const void*, unsigned long);

enum { HEAD = 2, ENTRY = 0, GRID_X, GRID_Y, ITEMS, COST, ARGUMENTS };
enum { MOVE = 1, COPY, JUMP, UNLESS, LOOP, AGAIN, COMPUTE, FIRST_ENTRY = 64 };
/* functions of COMPUTE */
enum { ADD, MULTIPLY, DIVIDE, REST, LEAST, MOST, IS_ZERO, IS_NEGATIVE };
/* operands */
enum { TARGET = 1, COUNTER, LIMIT, CONDITION, LEFT, WHOLE, TIMES, SOURCE = 1, SUM, COUNT, WORDS, TO = 1, FROM, BYTES,
       UNLESS_BYTE = 2, OF_LEFT = 1, FUNCTIONS, FIRST_FUNCTION };

/* control rows between two looks at the clock; a copy of so many bytes is worth one */
#define TURNS 64
#define LONG_COPY 65536

static inline int is_control(const u64* row) { return row[ENTRY] < FIRST_ENTRY; }

/* The next step behind a LOOP: of its body, behind it, or the end of the run. */
static u64 loop(u64* t, u64* row, u64 step) {
  i64 done = (i64)t[row[COUNTER]], limit = row[LIMIT] ? *(const i64*)t[row[LIMIT]] : 0;
  if ((row[LIMIT] && done >= limit) || !*(const unsigned char*)t[row[CONDITION]]) {
    row[TIMES] = (u64)done;
    return row[TARGET];
  }
  u64* left = t + row[LEFT];
  if (!left[0] || (row[WHOLE] && row[LIMIT] && (u64)(limit - done) > left[0])) {
    left[1] = step + 1;
    return t[0];
  }
  left[0]--;
  return step + 1;
}

/* The floor of a quotient; 0 where nothing is divided. */
static inline i64 divided(i64 a, i64 b) {
  if (b <= 0) return 0;
  return a / b - (a % b < 0);
}

/* The next step behind a COMPUTE: the one behind it, or the end of the run. */
static u64 compute(u64* t, const u64* row, u64 step) {
  const u64* f = row + FIRST_FUNCTION;
  for (u64 k = 0; k < row[FUNCTIONS]; k++, f += 4) {
    i64 a = (i64)t[f[2]], b = (i64)t[f[3]], made = 0;
    switch (f[0]) {
      case ADD: made = (i64)((u64)a + (u64)b); break;
      case MULTIPLY: made = (i64)((u64)a * (u64)b); break;
      case DIVIDE: made = divided(a, b); break;
      case REST: made = b > 0 ? a - divided(a, b) * b : 0; break;
      case LEAST: made = a < b ? a : b; break;
      case MOST: made = a > b ? a : b; break;
      default:
        if ((f[0] == IS_ZERO ? a == 0 : a < 0) == (int)f[1]) continue;
        t[row[OF_LEFT] + 1] = step + 1;
        return t[0];
    }
    t[f[1]] = (u64)made;
  }
  return step + 1;
}

/* Carry out a control row. Answers the next step. */
static u64 control(u64* t, u64* row, u64 step) {
  switch (row[ENTRY]) {
    case MOVE:
      for (u64 k = 0, value = t[row[SOURCE]] + row[SUM]; k < row[COUNT]; k++) t[row[WORDS + k]] = value;
      return step + 1;
    case COPY:
      if (t[row[TO]] != t[row[FROM]]) memcpy((void*)t[row[TO]], (const void*)t[row[FROM]], row[BYTES]);
      return step + 1;
    case JUMP: return row[TARGET];
    case UNLESS: return *(const unsigned char*)t[row[UNLESS_BYTE]] ? step + 1 : row[TARGET];
    case LOOP: return loop(t, row, step);
    case AGAIN: t[row[COUNTER]]++; return row[TARGET];
    case COMPUTE: return compute(t, row, step);
    default: return t[0];
  }
}

/* Whether the clock is worth a look behind a control row. */
static inline int is_turn(const u64* row, u32* turns) {
  return !(++*turns % TURNS) || (row[ENTRY] == COPY && row[BYTES] >= LONG_COPY);
}

static int within(u64 wanted, int least, int most) {
  return wanted < (u64)least ? least : wanted > (u64)most ? most : (int)wanted;
}

/* loops around a row that `is_worth_waking` counts */
#define DEPTH 16

/* Is anything of a run worth a worker, where so many ticks are a microsecond? Where costs are unknown, it is. A loop is as long as the last time. What stands
   behind a control row may never run: where it does, and its cost is unknown, `publish` calls for workers. */
static int is_worth_waking(const u64* t, u64 us) {
  u64 all = 0, times = 1, before[DEPTH], end[DEPTH];
  int depth = 0, certain = 1;
  for (u64 step = 0; step < t[0]; step++) {
    while (depth && step >= end[depth - 1]) times = before[--depth];
    const u64* row = t + t[HEAD + step];
    if (is_control(row)) {
      if (row[ENTRY] != MOVE && row[ENTRY] != COPY && row[ENTRY] != COMPUTE) certain = 0;
      if (row[ENTRY] != LOOP || depth == DEPTH) continue;
      end[depth] = row[TARGET];
      before[depth++] = times;
      times = within(times * (u64)within(row[TIMES], 1, 1024), 1, 1 << 20);
      continue;
    }
    if (row[ITEMS] < 2) continue;
    u64 cost = __atomic_load_n(&row[COST], __ATOMIC_RELAXED), one = cost * row[ITEMS] / 1024;
    if (!cost && certain) return 1;
    if (one > us * 60) return 1;
    if (one >= us * 3) all += one * times;
  }
  return all > us * 60;
}

