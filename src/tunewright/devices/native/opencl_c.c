/* Runs a kernel in OpenCL C over a range of its grid. OpenCL C has no variables of a thread, so this part is C: the
kernel comes as bitcode and is compiled into the loop. COUNT_X and COUNT_Y are the sizes of the grid. */

typedef unsigned long long u64;
typedef __SIZE_TYPE__ size_t;

static _Thread_local size_t here[3];

__attribute__((always_inline)) size_t tunewright_global_id(unsigned n) { return here[n]; }

/* One work-item: the kernel with its arguments out of the table. */
extern void tunewright_item(const u64* arguments);

__attribute__((visibility("default"))) void tunewright_kernel(const u64* arguments, int item, int end, int x, int y) {
  while (item < end) {
    const int first = item % COUNT_X, row = item / COUNT_X;
    const int last = end - item < COUNT_X - first ? first + (end - item) : COUNT_X;
    here[1] = row % COUNT_Y;
    here[2] = row / COUNT_Y;
    for (int k = first; k < last; k++) {
      here[0] = k;
      tunewright_item(arguments);
    }
    item += last - first;
  }
}
