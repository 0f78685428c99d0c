/* Stresses control rows: random programs of nested loops and branches from many threads at once. Stands behind
pool_stress.c.

A program is a tree. It is written as a table, which the pool runs, and gone through by `follow`, one item after the
other. Both must leave the same bytes: so each item ran once, in the right iteration, and steps ran in order. Trip counts
and conditions are computed by kernels, a program may use up its iterations, runs are cut into slices and given up. */

extern int memcmp(const void*, const void*, unsigned long);
extern void* memset(void*, int, unsigned long);

#define NUMBERS 96      /* of an array */
#define MOST_NODES 48
#define MOST_ROWS 400
#define BUDGET 150      /* iterations */
#define WIDE 12         /* numbers of a row that a loop writes */
#define TABLE_WORDS 16384

enum { DIFFERENT = 20, TIMES_WRONG, FAILURE_WRONG, TOO_LARGE };
enum { MIX, DECIDE, WRITE_ROW, SWAP_ARRAYS, COPY_ARRAY, LOOP_NODE, IF_NODE };

struct world { /* what a program works on */
  int array[2][NUMBERS];
  int rows[MOST_NODES][BUDGET + 1][WIDE];
  i64 limit[4];
  unsigned char truth[4], always;
};

struct node {
  int kind, id, items, limit, truth, burn; /* limit, truth: which one; -1: none, always */
  int child, other, next;                  /* first of a body or a branch, of the other branch, what follows; -1: none */
  int step;                                /* its row; of a loop, LOOP */
  i64 done;                                /* iterations so far */
  u64 ran;                                 /* how often */
};

struct program {
  struct world w;
  struct node node[MOST_NODES];
  int nodes, wrong, inside, limit;
  int front; /* which array is in front */
  u64 left, failed;
  /* the table */
  u64 *t, at, steps;
};

/* words of variables at the end of a table */
enum {
  FRONT = TABLE_WORDS - 400, BACK, SPARE, LEFT_WORD, FAILED_WORD, BUDGET_WORD, ZERO, ARRAY_0, ARRAY_1, LIMITS,
  TRUTHS = LIMITS + 4, ALWAYS = TRUTHS + 4, COUNTERS, ROWS_NOW = COUNTERS + MOST_NODES, ROWS_BASE = ROWS_NOW + MOST_NODES,
};

static void mix_one(int* out, const int* in, int i, int id, i64 counter) {
  out[i] = (int)((u32)out[i] * 31u + (u32)in[(i * 7919 + 13) % NUMBERS] + (u32)id + (u32)counter * 1000003u);
}

static void decide_now(struct world* w, const int* from, int id, int limit, int truth) {
  u32 seen = (u32)from[0] * 7u + (u32)from[NUMBERS / 2] + (u32)id;
  if (limit >= 0) w->limit[limit] = (i64)(seen >> 3 & 7) - 2;
  if (truth >= 0) w->truth[truth] = (seen >> 9 & 3) != 0;
}

static void write_one(int* row, const int* from, int i, i64 counter) { row[i] = (int)((u32)from[i] ^ (u32)counter * 17u); }

/* arguments: the program, node, words of the table that hold addresses (out, in), the address of a counter */
static void enter_kernel(struct program* g) {
  if (__atomic_add_fetch(&g->inside, 1, __ATOMIC_RELAXED) > g->limit) __atomic_store_n(&g->wrong, TOO_MANY, __ATOMIC_RELAXED);
}
static void leave_kernel(struct program* g) { __atomic_sub_fetch(&g->inside, 1, __ATOMIC_RELAXED); }

static void mix_kernel(const u64* a, int begin, int end, int x, int y) {
  struct program* g = (struct program*)a[0];
  struct node* n = (struct node*)a[1];
  (void)x, (void)y;
  enter_kernel(g);
  for (int i = begin; i < end; i++) {
    for (volatile int k = 0; k < n->burn; k++) {}
    mix_one(*(int**)a[2], *(int**)a[3], i, n->id, *(i64*)a[4]);
  }
  leave_kernel(g);
}

static void decide_kernel(const u64* a, int begin, int end, int x, int y) {
  struct program* g = (struct program*)a[0];
  struct node* n = (struct node*)a[1];
  (void)begin, (void)end, (void)x, (void)y;
  enter_kernel(g);
  decide_now(&g->w, *(int**)a[2], n->id, n->limit, n->truth);
  leave_kernel(g);
}

/* its arguments are moved by the loop: out is the row itself */
static void row_kernel(const u64* a, int begin, int end, int x, int y) {
  struct program* g = (struct program*)a[0];
  (void)x, (void)y;
  enter_kernel(g);
  for (int i = begin; i < end; i++) write_one((int*)a[2], *(int**)a[3], i, *(i64*)a[4]);
  leave_kernel(g);
}

static u64* row_at(struct program* g, u64 words) {
  g->t[HEAD + g->steps++] = g->at;
  u64* row = g->t + g->at;
  g->at += words;
  return row;
}

static void write_row(struct program* g, u64 a, u64 b, u64 c, u64 d, u64 e) {
  u64* row = row_at(g, 9);
  row[0] = a, row[1] = b, row[2] = c, row[3] = d, row[4] = e;
}

static void write_move(struct program* g, u64 from, u64 to, u64 add) { write_row(g, MOVE, from, add, 1, to); }

static void write_kernel(struct program* g, struct node* n, entry_t entry, int items, u64 cost, int loop) {
  n->step = (int)g->steps;
  write_row(g, (u64)entry, (u64)items, 1, (u64)items, cost);
  u64* a = g->t + g->at - 4;
  g->at++;
  a[0] = (u64)g, a[1] = (u64)n, a[2] = (u64)(g->t + FRONT), a[3] = (u64)(g->t + BACK);
  a[4] = (u64)(g->t + (loop < 0 ? ZERO : COUNTERS + loop));
}

/* `loop`: the node of the loop around it, or -1 */
static void write_nodes(struct program* g, int at, int loop, u64* random) {
  static const u64 costs[] = {0, 0, 1, 1, 1000, 200000, 1u << 30};
  for (; at >= 0; at = g->node[at].next) {
    struct node* n = &g->node[at];
    u64 cost = costs[below(random, 7)];
    switch (n->kind) {
      case MIX: write_kernel(g, n, mix_kernel, n->items, cost, loop); break;
      case DECIDE: write_kernel(g, n, decide_kernel, 1, cost, loop); break;
      case WRITE_ROW: {
        write_kernel(g, n, row_kernel, WIDE, cost, loop);
        u64 place = g->at - 3; /* of its argument 2 */
        g->t[place] = (u64)g->w.rows[loop];
        u64* row = row_at(g, 6); /* both the argument and a variable of the loop */
        row[0] = MOVE, row[1] = ROWS_NOW + (u64)loop, row[2] = WIDE * sizeof(int), row[3] = 2;
        row[4] = ROWS_NOW + (u64)loop, row[5] = place;
        break;
      }
      case SWAP_ARRAYS:
        write_move(g, FRONT, SPARE, 0);
        write_move(g, BACK, FRONT, 0);
        write_move(g, SPARE, BACK, 0);
        break;
      case COPY_ARRAY: write_row(g, COPY, BACK, FRONT, sizeof g->w.array[0], 0); break;
      case LOOP_NODE: {
        u64 counter = COUNTERS + (u64)at, place = 0;
        write_move(g, ZERO, counter, 0);
        for (int k = n->child; k >= 0; k = g->node[k].next) if (g->node[k].kind == WRITE_ROW) place = 1;
        if (place) write_move(g, ROWS_BASE + (u64)at, ROWS_NOW + (u64)at, 0);
        u64 reset = g->steps;
        if (place) write_move(g, ROWS_BASE + (u64)at, SPARE, 0); /* and the argument; see below */
        n->step = (int)g->steps;
        u64* row = row_at(g, 8);
        row[0] = LOOP, row[COUNTER] = counter, row[LIMIT] = n->limit < 0 ? 0 : LIMITS + (u64)n->limit;
        row[CONDITION] = n->truth < 0 ? ALWAYS : TRUTHS + (u64)n->truth, row[LEFT] = LEFT_WORD, row[WHOLE] = 0;
        row[TIMES] = 0;
        write_nodes(g, n->child, at, random);
        for (int k = n->child; k >= 0; k = g->node[k].next)
          if (g->node[k].kind == WRITE_ROW)
            g->t[g->t[HEAD + reset] + WORDS] = g->t[HEAD + g->node[k].step] + ARGUMENTS + 2;
        write_row(g, AGAIN, (u64)n->step, counter, 0, 0);
        row[TARGET] = g->steps;
        break;
      }
      case IF_NODE: {
        u64* row = row_at(g, 3);
        row[0] = UNLESS, row[UNLESS_BYTE] = n->truth < 0 ? ALWAYS : TRUTHS + (u64)n->truth;
        write_nodes(g, n->child, loop, random);
        u64* jump = row_at(g, 2);
        row[TARGET] = g->steps;
        write_nodes(g, n->other, loop, random);
        jump[0] = JUMP, jump[TARGET] = g->steps;
        break;
      }
    }
  }
}

/* The same, one item after the other. Answers whether the iterations are used up. */
static int follow(struct program* g, int at, i64* counter, int loop) {
  i64 zero = 0;
  if (!counter) counter = &zero;
  for (; at >= 0; at = g->node[at].next) {
    struct node* n = &g->node[at];
    int *front = g->w.array[g->front], *back = g->w.array[!g->front];
    n->ran++;
    switch (n->kind) {
      case MIX: for (int i = 0; i < n->items; i++) mix_one(front, back, i, n->id, *counter); break;
      case DECIDE: decide_now(&g->w, front, n->id, n->limit, n->truth); break;
      case WRITE_ROW: for (int i = 0; i < WIDE; i++) write_one(g->w.rows[loop][*counter], back, i, *counter); break;
      case SWAP_ARRAYS: g->front = !g->front; break;
      case COPY_ARRAY: for (int i = 0; i < NUMBERS; i++) back[i] = front[i]; break;
      case LOOP_NODE:
        for (n->done = 0;; n->done++) {
          if ((n->limit >= 0 && n->done >= g->w.limit[n->limit]) || (n->truth >= 0 && !g->w.truth[n->truth])) break;
          if (!g->left) {
            g->failed = (u64)n->step + 1;
            return 1;
          }
          g->left--;
          if (follow(g, n->child, &n->done, at)) return 1;
        }
        break;
      case IF_NODE:
        if (follow(g, n->truth < 0 || g->w.truth[n->truth] ? n->child : n->other, counter, loop)) return 1;
        break;
    }
  }
  return 0;
}

/* Random nodes one after the other. `loop`: in one; only one node of a body writes rows. */
static int grow(struct program* g, u64* random, int depth, int loop) {
  int first = -1, last = -1, wrote = 0;
  for (int count = below(random, depth ? 4 : 6); count >= 0 && g->nodes < MOST_NODES; count--) {
    int at = g->nodes++, kind = below(random, 12);
    struct node* n = &g->node[at];
    kind = kind < 5 ? MIX : kind < 7 ? DECIDE : kind == 7 ? WRITE_ROW : kind == 8 ? SWAP_ARRAYS : kind == 9 ? COPY_ARRAY
           : kind == 10 ? LOOP_NODE : IF_NODE;
    if (kind == WRITE_ROW && (!loop || wrote)) kind = MIX;
    if (kind >= LOOP_NODE && depth == 4) kind = MIX;
    wrote |= kind == WRITE_ROW;
    *n = (struct node){kind, at * 77 + 1, below(random, NUMBERS + 1), below(random, 5) - 1, below(random, 6) - 1,
                       below(random, 4) ? 0 : below(random, 200), -1, -1, -1, -1, 0, 0};
    if (n->truth > 3) n->truth = -1;
    if (kind == LOOP_NODE && n->limit < 0 && n->truth < 0 && below(random, 8)) n->limit = 0; /* few never end */
    if (kind >= LOOP_NODE) n->child = grow(g, random, depth + 1, kind == LOOP_NODE);
    if (kind == IF_NODE) n->other = grow(g, random, depth + 1, 0);
    if (last >= 0) g->node[last].next = at;
    if (first < 0) first = at;
    last = at;
  }
  return first;
}

static void prepare(struct program* g, u64 seed) {
  memset(&g->w, 0, sizeof g->w);
  g->w.always = 1;
  for (int i = 0; i < NUMBERS; i++) g->w.array[0][i] = (int)(next(&seed) >> 20), g->w.array[1][i] = i;
  for (int k = 0; k < 4; k++) g->w.limit[k] = below(&seed, 5), g->w.truth[k] = below(&seed, 4) != 0;
  g->front = 0;
  g->left = BUDGET;
  g->failed = 0;
  g->inside = 0;
}

static int one_program(struct case_* c, struct program* g, struct program* right) {
  u64 *random = &c->random, seed = next(random) | 1;
  g->nodes = g->wrong = 0;
  int root = grow(g, random, 0, 0), limit = 1 + below(random, 8);
  g->limit = limit;
  g->at = HEAD + MOST_ROWS;
  g->steps = 0;
  u64* t = g->t;
  t[1] = (u64)limit;
  write_move(g, BUDGET_WORD, LEFT_WORD, 0);
  write_move(g, ZERO, FAILED_WORD, 0);
  write_move(g, ARRAY_0, FRONT, 0);
  write_move(g, ARRAY_1, BACK, 0);
  write_nodes(g, root, -1, random);
  t[0] = g->steps;
  if (g->steps > MOST_ROWS || g->at > FRONT) return TOO_LARGE;
  t[BUDGET_WORD] = BUDGET, t[ZERO] = 0, t[ARRAY_0] = (u64)g->w.array[0], t[ARRAY_1] = (u64)g->w.array[1];
  for (u64 k = 0; k < 4; k++) t[LIMITS + k] = (u64)&g->w.limit[k], t[TRUTHS + k] = (u64)&g->w.truth[k];
  t[ALWAYS] = (u64)&g->w.always;
  for (u64 k = 0; k < MOST_NODES; k++) t[ROWS_BASE + k] = (u64)g->w.rows[k];
  static const u64 slices[] = {0, 1, 20, 300, 50000};
  u64 times[1 + 2 * MOST_ROWS];
  for (int turn = 0; turn < 3; turn++) { /* the same table again, also behind a run that was given up */
    prepare(g, seed + (u64)turn * 2);
    struct run r = {t, below(random, 2) ? times : 0, slices[below(random, 5)], 0, 0, 0, 0, 0};
    int patience = below(random, 3) ? 1 << 30 : below(random, 12), over = 1;
    while (pool_run(c->pool, &r)) {
      c->slices++;
      if (!patience--) {
        pool_cancel(c->pool, &r);
        over = 0;
        break;
      }
    }
    c->finished += (u64)over;
    c->cancelled += (u64)!over;
    if (g->wrong) return g->wrong;
    if (g->inside) return NEVER;
    if (!over) continue;
    for (int k = 0; k < g->nodes; k++) right->node[k] = g->node[k];
    prepare(right, seed + (u64)turn * 2);
    follow(right, root, 0, -1);
    if (memcmp(&g->w, &right->w, sizeof g->w)) return DIFFERENT;
    if (t[FAILED_WORD] != right->failed || t[LEFT_WORD] != right->left) return FAILURE_WRONG;
    for (int k = 0; r.times && k < g->nodes; k++) {
      struct node* n = &right->node[k];
      if (n->kind <= WRITE_ROW && times[2 * n->step + 2] != n->ran) return TIMES_WRONG;
    }
  }
  return RIGHT;
}

static void* program_turns(void* argument) {
  struct case_* c = argument;
  struct program *g = calloc(1, sizeof *g), *right = calloc(1, sizeof *right);
  g->t = calloc(TABLE_WORDS, 8);
  for (int k = 0; k < c->runs && !c->wrong; k++) c->wrong = one_program(c, g, right);
  free(g->t);
  free(g);
  free(right);
  return 0;
}

/* As `pool_stress`. */
EXPORT int control_stress(int threads, int runs, int cores, int workers, u64 spin, u64 seed, u64* told) {
  return stress(program_turns, threads, runs, cores, workers, spin, seed, told);
}

#ifdef MAIN /* how often */
int main(void) {
  u64 told[3] = {0, 0, 0};
  int wrong = 0;
  for (u64 seed = 1; seed <= 4 && !wrong; seed++) {
    wrong = pool_stress(3, 15 * MAIN, 8, 4, seed % 2 ? 0 : 20, seed, told);
    if (!wrong) wrong = pool_stress(70, 2 * MAIN, 2, 1, 5, seed, told);
    if (!wrong) wrong = control_stress(3, 5 * MAIN, 8, 4, seed % 2 ? 0 : 20, seed, told);
    if (!wrong) wrong = control_stress(70, MAIN, 2, 1, 5, seed, told);
  }
  printf("wrong %d, finished %llu, cancelled %llu, slices %llu\n", wrong, told[0], told[1], told[2]);
  return wrong != 0;
}
#endif
