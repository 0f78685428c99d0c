/* The thread pool: runs a table of kernel steps on the calling thread and on workers.

A run lives in a slot. A step's items are split into parts, one for each participant; a part is one word,

    number of the run << 32 | items that nobody has taken yet

in a cache line of its own. A participant takes items from its own part first and then helps with the others. Taking is
one compare-and-swap, and only who holds items reads anything of the caller's: a worker that is late, asleep or
descheduled holds nothing, and nobody waits for it. Whoever reports the last items of a step begins the next one, and
runs steps that are too short to share by itself.

Stands behind the text of launch_table.c, which says what a table is.
*/

typedef void (*entry_t)(const u64* arguments, int begin, int end, int x, int y);

extern int pthread_create(u64*, const void*, void* (*)(void*), void*);
extern int pthread_sigmask(int, const u64*, u64*);
extern int sigfillset(u64*);
extern int sched_getcpu(void);
extern int sched_yield(void);
extern u64 pthread_self(void);
extern int sched_setaffinity(int, u64, const void*);
extern int prctl(int, ...);
extern long syscall(long, ...);
struct timespec { i64 seconds, nanoseconds; };
extern int clock_gettime(int, struct timespec*);

#define EXPORT __attribute__((visibility("default")))
#define LINE __attribute__((aligned(64)))
#define LOAD(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define PEEK(p) __atomic_load_n(p, __ATOMIC_RELAXED)
#define STORE(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define POKE(p, v) __atomic_store_n(p, v, __ATOMIC_RELAXED)
#define ADD(p, v) __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST)

#define SLOTS 64
#define PARTS 64
#define WORKERS 1024
#define MASK_WORDS 128 /* of a set of processors, 64 in each */

#if defined(__x86_64__)
#define SYS_FUTEX 202
#define SYS_GETTID 186
#define RELAX() __builtin_ia32_pause()
static inline u64 ticks(void) { return __builtin_ia32_rdtsc(); }
typedef u32 float_mode;
/* denormals are zero, rounding to nearest, nothing traps: whatever the caller's mode is, results are the same */
static inline float_mode enter_mode(void) { u32 old = __builtin_ia32_stmxcsr(); __builtin_ia32_ldmxcsr(0x9fc0); return old; }
static inline void leave_mode(float_mode old) { __builtin_ia32_ldmxcsr(old); }
#elif defined(__aarch64__)
#define SYS_FUTEX 98
#define SYS_GETTID 178
#define RELAX() __asm__ volatile("yield")
static inline u64 ticks(void) { u64 t; __asm__ volatile("mrs %0, cntvct_el0" : "=r"(t)); return t; }
typedef u64 float_mode;
static inline float_mode enter_mode(void) {
  u64 old, flush = 1u << 24;
  __asm__ volatile("mrs %0, fpcr" : "=r"(old));
  __asm__ volatile("msr fpcr, %0" : : "r"(flush));
  return old;
}
static inline void leave_mode(float_mode old) { __asm__ volatile("msr fpcr, %0" : : "r"(old)); }
#else
#error "no thread pool for this processor"
#endif

/* ---- what there is ---------------------------------------------------------------------------------------------- */

enum { FREE, CLAIMED, RUNNING, FINISHED };
struct slot {
  LINE u64 part[PARTS][8];
  LINE i64 done;     /* items of the step that are over */
  LINE u32 epoch;    /* counts steps that were begun: who waits for one watches it */
  u32 caller_sleeps; /* the caller waits for the epoch in the kernel */
  LINE u32 state;
  u32 wanted;        /* the step may have items for somebody who comes now */
  int joined;        /* workers */
  /* of the run; written by the caller before it begins */
  u32 run;           /* its number: who joined another one finds nothing to take */
  LINE u64* table;
  u64* times;
  int limit, cpu;
  u32 cancelled;
  /* of the step; written by who begins it, read by who holds items of it */
  LINE u32 step;     /* the next one */
  u32 begun;         /* 1 + the one that runs; 0: none */
  u64* row;
  u64 pause[ARGUMENTS]; /* a row of its own, where a slice ends between control rows */
  u64 called;        /* when workers were called last, or the run began */
  int items, parts, least, most;
};

struct worker {
  struct pool* pool;
  int number, cpu;
  long thread; /* as the system numbers it */
  u64 mask[MASK_WORDS];
};

struct pool {
  LINE u32 sequence; /* counts calls for workers: idle ones watch it */
  LINE int sleepers;
  int to_wake;
  LINE int busy;     /* callers and workers that run steps */
  LINE int used;     /* slots that were ever claimed */
  LINE u64 turn;     /* the thread that came back to Python last; 0: it runs steps again */
  u64 since;         /* when it did */
  int cores, workers, pinned;
  u64 spin;          /* ticks that an idle worker looks for work before it sleeps, and a caller waits for its turn */
  u64 us;            /* ticks in a microsecond */
  u64 generation;    /* forks between the process that made it and this one */
  struct slot slots[SLOTS];
  struct worker worker[WORKERS];
};

/* ---- sleeping and waking ---------------------------------------------------------------------------------------- */

/* in the kernel until somebody wakes those with one of these bits, or the word is another one already */
static void sleep_while(u32* at, u32 value, u32 bits) { syscall(SYS_FUTEX, at, 128 | 9, value, 0, 0, bits); }

/* in the kernel until the word changes, for so many nanoseconds at most */
static void sleep_until_change(u32* at, u32 value, u64 ns) {
  struct timespec most = {(i64)(ns / 1000000000u), (i64)(ns % 1000000000u)};
  syscall(SYS_FUTEX, at, 128 | 0, value, &most, 0, 0);
}

static u32 bit_of(int cpu) { return 1u << (cpu & 31); }

/* Two at a time: those who wake up wake the next ones. A worker that is bound to the caller's core stays asleep. */
static void wake_some(struct pool* p, int cpu) {
  int left = PEEK(&p->to_wake);
  while (left > 0) {
    int few = left < 2 ? left : 2;
    if (!__atomic_compare_exchange_n(&p->to_wake, &left, left - few, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
    u32 bits = PEEK(&p->pinned) && cpu >= 0 ? ~bit_of(cpu) : ~0u;
    syscall(SYS_FUTEX, &p->sequence, 128 | 10, few, 0, 0, bits);
    return;
  }
}

static void call_workers(struct pool* p, int count, int cpu) {
  ADD(&p->sequence, 1);
  if (__atomic_load_n(&p->sleepers, __ATOMIC_SEQ_CST) <= 0) return;
  STORE(&p->to_wake, count);
  wake_some(p, cpu);
}

static void announce(struct slot* s) {
  ADD(&s->epoch, 1);
  if (__atomic_load_n(&s->caller_sleeps, __ATOMIC_SEQ_CST)) syscall(SYS_FUTEX, &s->epoch, 128 | 1, 1, 0, 0, 0);
}

/* ---- steps ------------------------------------------------------------------------------------------------------ */

static inline int part_begin(const struct slot* s, int part) { return (int)((i64)s->items * part / s->parts); }

/* Costs are the least that was seen, since a thread may be held up. But a step may have got more to do: where it takes
   twice as long, its cost becomes higher little by little. */
static inline void learn(u64* row, u64 took, int items) {
  u64 known = PEEK(&row[COST]);
  double over = (double)(i64)took * 1024, least = (double)(i64)known * items; /* sooner than to divide */
  if (known && over >= least) {
    if (over >= 2 * least) POKE(&row[COST], known + known / 8 + 1);
    return;
  }
  u64 cost = took * 1024 / (u64)items;
  if (!known || cost < known) POKE(&row[COST], cost ? cost : 1);
}

/* Answers when it ended. */
static u64 run_items(u64* row, int begin, int end) {
  u64 before = ticks();
  ((entry_t)row[ENTRY])(row + ARGUMENTS, begin, end, (int)row[GRID_X], (int)row[GRID_Y]);
  u64 after = ticks();
  learn(row, after - before, end - begin);
  return after;
}

/* How many items somebody takes at a time: half of what is left of a part, within 1 us and 100 us of work. Who is held
   up with some delays the others by no more than that. */
static void pace(const struct pool* p, struct slot* s, u64 cost) {
  POKE(&s->least, within(p->us * 1024 / cost, 1, s->items));
  POKE(&s->most, within(p->us * 100 * 1024 / cost, 1, s->items));
}

/* Offer a step to participants: each has a part of it, if it is worth 1.5 us at least. */
static void publish(struct pool* p, struct slot* s, u64* row) {
  int items = (int)row[ITEMS], parts = s->limit < items ? s->limit : items;
  u64 cost = PEEK(&row[COST]), all = cost * (u64)items / 1024;
  if (cost && all < p->us * 3 / 2 * (u64)parts) parts = (int)(all / (p->us * 3 / 2)) + 1;
  if (parts > PARTS) parts = PARTS;
  s->row = row;
  s->items = items;
  POKE(&s->parts, parts);
  POKE(&s->least, 1);
  POKE(&s->most, 1); /* a first taste: an item may take long, and nobody could come in between */
  if (cost) pace(p, s, cost);
  POKE(&s->done, 0);
  POKE(&s->wanted, parts > 1);
  u64 run = (u64)PEEK(&s->run) << 32;
  int cpu = PEEK(&s->cpu), joined = PEEK(&s->joined); /* behind the last part the slot may be another run's */
  u64 now = ticks();
  /* who looks for work sees this step; who fell asleep is worth waking for a long one, and behind 100 us without help */
  int calls = parts - 1 > joined && PEEK(&p->busy) < p->cores
              && (!cost || all > p->us * 100 || (i64)(now - s->called) > (i64)(p->us * 100));
  if (calls) s->called = now;
  for (int k = 0; k < parts; k++) STORE(&s->part[k][0], run | (u32)(part_begin(s, k + 1) - part_begin(s, k)));
  announce(s);
  if (calls) call_workers(p, parts - 1 - joined, cpu);
  else if (parts - 1 > joined) ADD(&p->sequence, 1);
}

/* times: when the last note was taken, then for each step the ticks that it took and how often it ran. */
static void start_notes(u64* times, u64 steps) {
  for (u64 k = 1; k <= 2 * steps; k++) times[k] = 0;
  times[0] = ticks();
}

/* The step ends that was begun, if there is one (1 + its number). */
static void note(u64* times, u32 begun) {
  u64 now = ticks();
  if (begun) {
    times[2 * begun - 1] += now - times[0];
    times[2 * begun]++;
  }
  times[0] = now;
}

static void nothing(const u64* arguments, int begin, int end, int x, int y) {
  (void)arguments, (void)begin, (void)end, (void)x, (void)y;
}

/* The step is over: begin the next one. Control rows and short steps run here, until the caller's slice is over. */
static void advance(struct pool* p, struct slot* s, u64 deadline) {
  u64 *t = s->table, now = 0, next = s->step;
  u32 turns = 0;
  for (;;) {
    if (s->times) note(s->times, s->begun);
    if (next >= t[0] || PEEK(&s->cancelled)) break;
    u64* row = t + t[HEAD + next];
    s->begun = (u32)next + 1;
    if (is_control(row)) {
      next = control(t, row, next);
      if (is_turn(row, &turns)) now = ticks();
      if (now <= deadline) continue;
      if (s->times) note(s->times, s->begun);
      s->begun = 0;
      row = s->pause; /* whoever takes its item goes on from here */
    } else {
      next++;
      if (!row[ITEMS]) continue;
      u64 all = PEEK(&row[COST]) * row[ITEMS] / 1024;
      if (all && all < p->us * (s->limit == 1 || row[ITEMS] == 1 ? 100 : 3) && now <= deadline) {
        now = run_items(row, 0, (int)row[ITEMS]);
        continue;
      }
    }
    s->step = (u32)next;
    publish(p, s, row);
    return;
  }
  STORE(&s->state, FINISHED);
  announce(s);
}

/* Take items until the step has none left. Answers whether there were any. */
static int take(struct pool* p, struct slot* s, u32 run, int me, u64 deadline) {
  int mine = 0, parts = PEEK(&s->parts);
  if (parts < 1 || parts > PARTS) parts = PARTS;
  for (int k = 0, at = me % parts; k < parts; k++, at = at + 1 == parts ? 0 : at + 1) {
    u64 word = LOAD(&s->part[at][0]);
    for (;;) {
      int left = (int)(u32)word;
      if (!left || (u32)(word >> 32) != run) break;
      int few = left / 2, least = PEEK(&s->least), most = PEEK(&s->most);
      if (few > most) few = most;
      if (few < least) few = least;
      if (few < 1) few = 1;
      if (left - few < few / 2 || few > left) few = left;
      if (!__atomic_compare_exchange_n(&s->part[at][0], &word, word - (u32)few, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
      /* what the slot says of the step holds until these items are reported */
      int begin = part_begin(s, at + 1) - left;
      u64* row = s->row;
      u64 known = PEEK(&row[COST]);
      run_items(row, begin, begin + few);
      if (!known) pace(p, s, PEEK(&row[COST]));
      mine += few;
      if (ticks() > deadline) goto report;
      word = LOAD(&s->part[at][0]);
    }
  }
  if (mine) POKE(&s->wanted, 0);
report:
  if (!mine) return 0;
  i64 all = s->items; /* read before the report: behind it the step may be another one */
  if (ADD(&s->done, mine) == all) advance(p, s, deadline);
  return 1;
}

/* ---- workers ---------------------------------------------------------------------------------------------------- */

static int may_join(struct pool* p, struct slot* s, const struct worker* w) {
  if (LOAD(&s->state) != RUNNING || !PEEK(&s->wanted) || PEEK(&p->busy) >= p->cores) return 0;
  if (PEEK(&p->pinned) && PEEK(&w->cpu) == PEEK(&s->cpu)) return 0;
  return PEEK(&s->joined) < PEEK(&s->limit) - 1;
}

/* One run: the next one in the slot may have fewer participants. */
static void help(struct pool* p, struct slot* s, const struct worker* w) {
  u32 run = LOAD(&s->run); /* the limit is of this one or of a later one, of which nothing is taken */
  int me = ADD(&s->joined, 1);
  if (ADD(&p->busy, 1) <= p->cores && me < PEEK(&s->limit)) {
    for (;;) {
      u32 epoch = LOAD(&s->epoch);
      if (take(p, s, run, me, ~0ull)) continue;
      if (LOAD(&s->state) != RUNNING || PEEK(&s->run) != run || PEEK(&p->busy) > p->cores) break;
      u64 begin = ticks();
      while (LOAD(&s->epoch) == epoch && ticks() - begin < PEEK(&p->spin)) RELAX();
      if (LOAD(&s->epoch) == epoch) break;
    }
  }
  ADD(&p->busy, -1);
  ADD(&s->joined, -1);
  (void)w;
}

static void* work(void* argument) {
  struct worker* w = argument;
  struct pool* p = w->pool;
  char name[16] = "tunewright-000";
  for (int n = w->number, at = 13; at > 10; at--, n /= 10) name[at] = (char)('0' + n % 10);
  prctl(15, name, 0, 0, 0);
  sched_setaffinity(0, sizeof w->mask, w->mask);
  STORE(&w->thread, syscall(SYS_GETTID));
  enter_mode();
  for (;;) {
    u32 sequence = LOAD(&p->sequence);
    int helped = 0;
    for (int k = 0, used = PEEK(&p->used); k < used; k++) {
      if (may_join(p, &p->slots[k], w)) {
        help(p, &p->slots[k], w);
        helped = 1;
      }
    }
    if (helped) continue;
    u64 begin = ticks();
    while (LOAD(&p->sequence) == sequence && ticks() - begin < PEEK(&p->spin)) RELAX();
    if (LOAD(&p->sequence) != sequence) continue;
    ADD(&p->sleepers, 1);
    int mine = PEEK(&p->pinned) ? PEEK(&w->cpu) : -1;
    sleep_while(&p->sequence, sequence, mine >= 0 ? bit_of(mine) : ~0u);
    ADD(&p->sleepers, -1);
    int cpu = -1;
    for (int k = 0, used = PEEK(&p->used); k < used; k++) if (LOAD(&p->slots[k].state) == RUNNING) cpu = PEEK(&p->slots[k].cpu);
    wake_some(p, cpu);
  }
  return 0;
}

/* ---- what Python calls ------------------------------------------------------------------------------------------ */

#if !defined(__aarch64__)
static u64 now_ns(void) {
  struct timespec t;
  clock_gettime(1, &t);
  return (u64)t.seconds * 1000000000u + (u64)t.nanoseconds;
}

/* The system's clock, and the processor's at the same time: the closest of some readings, since this thread may be
   descheduled between the two. */
static u64 both_clocks(u64* at) {
  u64 found = 0, closest = ~0ull;
  for (int k = 0; k < 5; k++) {
    u64 before = ticks(), ns = now_ns(), after = ticks();
    if (after - before < closest) {
      closest = after - before;
      *at = before + closest / 2;
      found = ns;
    }
  }
  return found;
}
#endif

/* Ticks in a microsecond. */
static u64 calibrate(void) {
#if defined(__aarch64__)
  u64 per_second;
  __asm__ volatile("mrs %0, cntfrq_el0" : "=r"(per_second));
  return per_second < 1000000 ? 1 : per_second / 1000000;
#else
  u64 first, last, begin = both_clocks(&first), end = begin;
  while (end - begin < 200000) end = both_clocks(&last);
  u64 found = (last - first) * 1000 / (end - begin);
  return found ? found : 1;
#endif
}

EXPORT u64 pool_bytes(void) { return sizeof(struct pool); }
EXPORT u64 pool_ticks(void) { return ticks(); }
EXPORT u64 pool_us(const struct pool* p) { return p->us; }

/* In zeroed memory that stays for ever. */
EXPORT void pool_make(struct pool* p, int cores) {
  p->cores = cores;
  p->us = calibrate();
}

/* In a forked child, before anything else runs: there are no workers, and nobody runs anything. What `pool_run` was given
   in the parent stays good. */
EXPORT void pool_forked(struct pool* p) {
  for (int k = 0; k < p->used; k++) {
    struct slot* s = &p->slots[k];
    for (int part = 0; part < PARTS; part++) s->part[part][0] = 0;
    s->caller_sleeps = s->wanted = 0;
    s->joined = 0;
    s->state = FREE;
  }
  for (int k = 0; k < p->workers; k++) p->worker[k].thread = 0;
  p->workers = p->sleepers = p->to_wake = p->busy = p->pinned = 0;
  p->turn = 0;
  p->generation++;
}

/* Microseconds that idle workers look for work. */
EXPORT void pool_spin(struct pool* p, u64 us) { POKE(&p->spin, us * p->us); }

/* One more worker. `mask`: the processors that it may use; `cpu`: the one that it is bound to, or -1. */
EXPORT int pool_add(struct pool* p, const u64* mask, int cpu) {
  if (p->workers >= WORKERS) return -1;
  struct worker* w = &p->worker[p->workers];
  w->pool = p;
  w->number = p->workers;
  w->cpu = cpu;
  for (int k = 0; k < MASK_WORDS; k++) w->mask[k] = mask[k];
  if (cpu >= 0) POKE(&p->pinned, 1);
  u64 all[16], old[16], id; /* signals are for the threads that Python knows */
  sigfillset(all);
  pthread_sigmask(2, all, old);
  int failed = pthread_create(&id, 0, work, w);
  pthread_sigmask(2, old, 0);
  if (failed) return failed;
  while (!LOAD(&w->thread)) sched_yield(); /* until it is where it belongs */
  POKE(&p->workers, p->workers + 1);
  return 0;
}

/* Where a worker that is there may run from now on. */
EXPORT void pool_bind(struct pool* p, int number, const u64* mask, int cpu) {
  struct worker* w = &p->worker[number];
  if (number >= p->workers) return;
  while (!LOAD(&w->thread)) RELAX(); /* it is about to start */
  sched_setaffinity((int)w->thread, sizeof w->mask, mask);
  POKE(&w->cpu, cpu);
  POKE(&p->pinned, cpu >= 0);
}

/* Wake so many workers, and wait for them for 200 us at most: whatever runs next is helped from its beginning. */
EXPORT void pool_rouse(struct pool* p, int count) {
  int workers = PEEK(&p->workers);
  if (count > workers) count = workers;
  if (count < 1 || PEEK(&p->spin) < p->us * 10) return; /* they would not stay awake */
  u64 begin = ticks();
  call_workers(p, count, PEEK(&p->pinned) ? sched_getcpu() : -1);
  while (PEEK(&p->sleepers) > workers - count && ticks() - begin < p->us * 200) RELAX();
}

/* A run of this table begins within some microseconds: wake workers meanwhile, and let those that are awake wait for it. */
EXPORT void pool_expect(struct pool* p, const u64* table) {
  int helpers = within(table[1] - 1, 0, PEEK(&p->workers));
  if (table[1] > 1 && helpers && is_worth_waking(table, p->us)) call_workers(p, helpers, PEEK(&p->pinned) ? sched_getcpu() : -1);
}

static struct slot* claim(struct pool* p) {
  for (int k = 0; k < SLOTS; k++) {
    u32 expected = FREE;
    if (PEEK(&p->slots[k].state) == FREE
        && __atomic_compare_exchange_n(&p->slots[k].state, &expected, CLAIMED, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
      int used = PEEK(&p->used);
      while (used <= k && !__atomic_compare_exchange_n(&p->used, &used, k + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
      return &p->slots[k];
    }
  }
  return 0;
}

/* What a caller holds of a run that is not over. */
struct run {
  u64* table;
  u64* times;  /* or null: see `start_notes` */
  u64 slice;   /* microseconds after which it comes back in between */
  struct slot* slot;
  u64 step, item; /* without a slot: where to go on */
  u64 generation; /* of the pool, when it began */
  u64 alone;      /* it began without a slot */
};

/* In a forked child a run that the parent had begun begins anew: whoever held items of it is not here. */
static int is_parents(const struct pool* p, struct run* r) {
  if (r->generation == p->generation) return 0;
  r->generation = p->generation;
  r->slot = 0;
  r->step = r->item = r->alone = 0;
  return 1;
}

/* Every step in order, by the calling thread alone: all slots are taken. Answers whether it is over. */
static int run_alone(const struct pool* p, struct run* r, u64 deadline) {
  u64* t = r->table;
  u32 turns = 0;
  if (!r->alone && r->times) start_notes(r->times, t[0]);
  r->alone = 1;
  while (r->step < t[0]) {
    u64 *row = t + t[HEAD + r->step], step = r->step, now = 0;
    if (is_control(row)) {
      r->step = control(t, row, step);
      if (is_turn(row, &turns)) now = ticks();
    } else {
      while (r->item < row[ITEMS]) {
        u64 left = row[ITEMS] - r->item, cost = PEEK(&row[COST]);
        int few = within(cost ? p->us * 1024 * 1024 / cost : 1, 1, (int)left);
        now = run_items(row, (int)r->item, (int)r->item + few);
        r->item += (u64)few;
        if (now > deadline && r->item < row[ITEMS]) return 0;
      }
      r->step++;
      r->item = 0;
    }
    if (r->times) note(r->times, (u32)step + 1);
    if (now > deadline && r->step < t[0]) return 0;
  }
  r->step = r->item = r->alone = 0;
  return 1;
}

/* ---- one behind the other ---------------------------------------------------------------------------------------- */

/* Callers need Python's lock again when they are through. Who finds it taken is put to sleep, which takes longer than a
   small network. So who comes back waits here, awake, until the one before is back in the pool, or somewhere else for
   long: then the lock is free, or not to be had soon. */
static void await_turn(struct pool* p, u64 me) {
  u64 begin = ticks(), now = begin, spin = PEEK(&p->spin);
  for (;;) {
    u64 before = LOAD(&p->turn);
    if (before && now - begin < spin && (i64)(now - PEEK(&p->since)) < (i64)spin) RELAX();
    else if (__atomic_compare_exchange_n(&p->turn, &before, me, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) break;
    now = ticks();
  }
  POKE(&p->since, now);
}

static void end_turn(struct pool* p, u64 me) {
  __atomic_compare_exchange_n(&p->turn, &me, 0, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

/* What `pool_run` answers. */
static int run_slice(struct pool* p, struct run* r) {
  if (is_parents(p, r)) return 2;
  float_mode old = enter_mode();
  struct slot* s = r->slot;
  u64 deadline = ticks() + r->slice * p->us;
  int over = 1;
  ADD(&p->busy, 1);
  if (!s && (r->alone || !(s = claim(p)))) {
    over = run_alone(p, r, deadline);
    goto leave;
  }
  if (!r->slot) {
    r->slot = s;
    s->table = r->table;
    s->times = r->times;
    if (s->times) start_notes(s->times, s->table[0]);
    POKE(&s->limit, r->table[1] < 1 ? 1 : (int)r->table[1]);
    POKE(&s->cpu, PEEK(&p->pinned) ? sched_getcpu() : -1);
    POKE(&s->cancelled, 0);
    s->step = s->begun = 0;
    s->called = ticks();
    s->pause[ENTRY] = (u64)nothing;
    s->pause[GRID_X] = s->pause[GRID_Y] = s->pause[ITEMS] = 1;
    POKE(&s->wanted, 0);
    STORE(&s->run, PEEK(&s->run) + 1);
    STORE(&s->state, RUNNING);
    int helpers = within((u64)s->limit - 1, 0, PEEK(&p->workers));
    if (helpers && PEEK(&p->sleepers) > 0 && is_worth_waking(s->table, p->us)) call_workers(p, helpers, s->cpu);
    advance(p, s, deadline);
  }
  for (;;) {
    u32 epoch = LOAD(&s->epoch);
    if (LOAD(&s->state) == FINISHED) break;
    int took = take(p, s, PEEK(&s->run), 0, deadline);
    u64 begin = ticks();
    if (begin > deadline && LOAD(&s->state) != FINISHED) { /* behind `take`: each call does something */
      over = 0;
      goto leave;
    }
    if (took) continue;
    /* others hold what is left, for 100 us at most unless they are held up; where time is rationed nobody spins */
    u64 spin = PEEK(&p->spin), patience = spin < p->us * 10 ? spin : p->us * 150;
    while (LOAD(&s->epoch) == epoch && ticks() - begin < patience) RELAX();
    if (LOAD(&s->epoch) != epoch) continue;
    __atomic_store_n(&s->caller_sleeps, 1, __ATOMIC_SEQ_CST);
    sleep_until_change(&s->epoch, epoch, 5000000);
    STORE(&s->caller_sleeps, 0);
  }
  r->slot = 0;
  STORE(&s->state, FREE);
leave:
  ADD(&p->busy, -1);
  leave_mode(old);
  return !over;
}

/* Run a table, or go on with it. 0: it is over; 1: the slice is over, call again or `pool_cancel`; 2: the process was
   forked since the last call, so that there may be no workers: call again. */
EXPORT int pool_run(struct pool* p, struct run* r) {
  u64 me = pthread_self();
  end_turn(p, me);
  int state = run_slice(p, r);
  await_turn(p, me);
  return state;
}

/* Give up a run that is not over: what is left of it is not begun. */
EXPORT void pool_cancel(struct pool* p, struct run* r) {
  is_parents(p, r);
  struct slot* s = r->slot;
  r->step = r->item = r->alone = 0;
  if (!s) return;
  STORE(&s->cancelled, 1);
  while (LOAD(&s->state) != FINISHED) {
    i64 dropped = 0;
    for (int k = 0; k < PARTS; k++) dropped += (i64)(u32)__atomic_exchange_n(&s->part[k][0], 0, __ATOMIC_ACQ_REL);
    i64 all = dropped ? s->items : 0; /* as in `take`: it holds while they are not reported */
    if (dropped && ADD(&s->done, dropped) == all) advance(p, s, 0);
    RELAX();
  }
  r->slot = 0;
  STORE(&s->state, FREE);
}
