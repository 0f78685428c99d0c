/* Stresses the thread pool: random tables from many threads at once. Stands behind the text of pool.c.

Every item must run exactly once; a step must see all of the one before it (read without atomics, so that
ThreadSanitizer knows, too); no run has more participants than it may; floating point is in the mode of kernels.
A run that is cancelled has run items at most once, and no step before the one in front of it was over. */

extern void* calloc(unsigned long, unsigned long);
extern void free(void*);
extern int pthread_join(u64, void**);
extern int sched_getaffinity(int, u64, void*);
extern int printf(const char*, ...);

#define MOST_STEPS 12
#define MOST_ITEMS 4096

enum { RIGHT, TWICE, NEVER, UNSEEN, TOO_MANY, MODE, GRID, LATE, NOTES, CALLER, BUSY };

struct case_ {
  struct pool* pool;
  u64 random;
  int runs, wrong;
  u64 finished, cancelled, slices;
};

struct tape {
  int count[MOST_STEPS][MOST_ITEMS]; /* how often an item ran */
  int value[MOST_STEPS][MOST_ITEMS]; /* what it wrote: plain, so that order matters */
  int items[MOST_STEPS];
  int inside, limit; /* threads that run items now, and how many may */
  int wrong;
};

static u64 next(u64* state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

static int below(u64* state, int n) { return (int)(next(state) >> 16) % n < 0 ? 0 : (int)((next(state) >> 16) % (u64)n); }

static void fail(struct tape* t, int why) { __atomic_store_n(&t->wrong, why, __ATOMIC_RELAXED); }

#if defined(__x86_64__)
/* as the compiler's programs have it; rounding up; to zero, with denormals flushed */
static const u32 modes[] = {0x1f80, 0x5f80, 0xff80}, inside = 0x9fc0;
static u32 mode_now(void) { return __builtin_ia32_stmxcsr() & 0xffc0; }
static void set_mode(u32 mode) { __builtin_ia32_ldmxcsr(mode); }
#else
static const u32 modes[] = {0, 1u << 22, 3u << 22 | 1u << 24}, inside = 1u << 24;
static u32 mode_now(void) {
  u64 mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return (u32)mode & 0x7c00000;
}
static void set_mode(u32 mode) { __asm__ volatile("msr fpcr, %0" : : "r"((u64)mode)); }
#endif

/* arguments: the tape, step, how long an item takes, x, y */
static void kernel(const u64* a, int begin, int end, int x, int y) {
  struct tape* t = (struct tape*)a[0];
  int step = (int)a[1];
  if (__atomic_add_fetch(&t->inside, 1, __ATOMIC_RELAXED) > t->limit) fail(t, TOO_MANY);
  if (mode_now() != inside) fail(t, MODE);
  if (x != (int)a[3] || y != (int)a[4] || begin >= end || end > t->items[step]) fail(t, GRID);
  for (int i = begin; i < end; i++) {
    if (__atomic_add_fetch(&t->count[step][i], 1, __ATOMIC_RELAXED) != 1) fail(t, TWICE);
    for (volatile u64 k = 0; k < a[2]; k++) {}
    int seen = 0, before = step - 1;
    while (before >= 0 && !t->items[before]) before--;
    if (before >= 0) {
      int at = (int)((u64)i * 7919 % (u64)t->items[before]);
      seen = t->value[before][at];
      if (seen != before * MOST_ITEMS + at + 1) fail(t, UNSEEN);
    }
    t->value[step][i] = step * MOST_ITEMS + i + 1;
  }
  __atomic_sub_fetch(&t->inside, 1, __ATOMIC_RELAXED);
}

static int check(struct tape* t, int steps, int over) {
  if (t->wrong) return t->wrong;
  int open = 0; /* a step that is not over was seen */
  for (int s = 0; s < steps; s++) {
    int ran = 0;
    for (int i = 0; i < t->items[s]; i++) ran += t->count[s][i];
    if (over && ran != t->items[s]) return NEVER;
    if (ran && open) return LATE;
    if (ran != t->items[s]) open = 1;
  }
  return t->inside ? NEVER : RIGHT;
}

static int one(struct case_* c, struct tape* t, u64* table) {
  static const int sizes[] = {0, 1, 1, 2, 3, 5, 8, 17, 63, 64, 65, 257, 1000, 4095};
  static const u64 costs[] = {0, 0, 1, 1000, 200000, 1u << 30};
  u64 times[2 * MOST_STEPS + 1];
  int steps = below(&c->random, MOST_STEPS + 1), limit = 1 + below(&c->random, 8), at = HEAD + steps;
  u64 burn = below(&c->random, 4) ? 0 : (u64)below(&c->random, 300);
  t->wrong = t->inside = 0;
  t->limit = limit;
  table[0] = (u64)steps;
  table[1] = (u64)limit;
  for (int s = 0; s < steps; s++) {
    int x = sizes[below(&c->random, 14)], y = x && x < 60 ? 1 + below(&c->random, 4) : 1, n = x * y;
    for (int i = 0; i < MOST_ITEMS; i++) t->count[s][i] = t->value[s][i] = 0;
    t->items[s] = n;
    u64 row[] = {(u64)kernel, (u64)x, (u64)y, (u64)n, costs[below(&c->random, 6)], (u64)t, (u64)s, burn, (u64)x, (u64)y};
    table[HEAD + s] = (u64)at;
    for (int k = 0; k < 10; k++) table[at++] = row[k];
  }
  for (int s = 0; s <= 2 * MOST_STEPS; s++) times[s] = 7;
  static const u64 slices[] = {0, 1, 20, 300, 50000};
  struct run r = {table, below(&c->random, 2) ? times : 0, slices[below(&c->random, 5)], 0, 0, 0, 0, 0};
  int patience = below(&c->random, 3) ? 1 << 30 : below(&c->random, 20), over = 1;
  u32 mode = modes[below(&c->random, 3)], kept = 1;
  set_mode(mode);
  while (pool_run(c->pool, &r)) {
    c->slices++;
    kept &= mode_now() == mode;
    if (!patience--) {
      pool_cancel(c->pool, &r);
      over = 0;
      break;
    }
  }
  kept &= mode_now() == mode;
  set_mode(modes[0]);
  if (!kept) return CALLER;
  c->finished += (u64)over;
  c->cancelled += (u64)!over;
  for (int s = 0; over && r.times && s < steps; s++) if (times[2 * s + 2] != 1) return NOTES;
  return check(t, steps, over);
}

static void* turns(void* argument) {
  struct case_* c = argument;
  struct tape* t = calloc(1, sizeof *t);
  u64* table = calloc(4096, 8);
  for (int k = 0; k < c->runs && !c->wrong; k++) c->wrong = one(c, t, table);
  free(t);
  free(table);
  return 0;
}

/* So many threads, each with so many runs, on a pool of so many cores and workers. What went wrong; 0: nothing.
   `told`: how many runs ended, were cancelled, and slices. */
static int stress(
    void* (*turns)(void*), int threads, int runs, int cores, int workers, u64 spin, u64 seed, u64* told) {
  struct pool* p = calloc(1, pool_bytes() + 64); /* never freed: its workers stay */
  p = (struct pool*)(((u64)p + 63) & ~63ull);
  u64 mask[MASK_WORDS] = {0}, id[256];
  sched_getaffinity(0, sizeof mask, mask);
  pool_make(p, cores);
  pool_spin(p, spin);
  for (int k = 0; k < workers; k++) pool_add(p, mask, -1);
  struct case_* cases = calloc((unsigned long)threads, sizeof *cases);
  for (int k = 0; k < threads; k++) {
    cases[k] = (struct case_){p, seed * 1000003 + (u64)k * 7919 + 1, runs, 0, 0, 0, 0};
    if (pthread_create(&id[k], 0, turns, &cases[k])) return -1;
  }
  int wrong = 0;
  for (int k = 0; k < threads; k++) {
    pthread_join(id[k], 0);
    if (cases[k].wrong) wrong = cases[k].wrong;
    told[0] += cases[k].finished;
    told[1] += cases[k].cancelled;
    told[2] += cases[k].slices;
  }
  free(cases);
  if (PEEK(&p->busy) < 0 || PEEK(&p->busy) > workers) return BUSY;
  return wrong;
}

EXPORT int pool_stress(int threads, int runs, int cores, int workers, u64 spin, u64 seed, u64* told) {
  return stress(turns, threads, runs, cores, workers, spin, seed, told);
}
