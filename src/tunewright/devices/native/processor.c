/* What the processor says of itself. Compiled for any x86-64 processor, and for any aarch64 one. */

typedef unsigned int u32;
typedef unsigned long long u64;

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)

static void cpuid(u32 leaf, u32 sub, u32* r) {
  __asm__ volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(sub));
}

/* Registers that the operating system saves: bit 2 upper halves of 256 bits, bits 5 to 7 AVX-512, 17 and 18 AMX. */
static u64 saved_registers(void) {
  u32 r[4], low, high;
  cpuid(1, 0, r);
  if (!(r[2] >> 27 & 1)) return 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (u64)high << 32 | low;
}

/* Fill `found` with leaves 1, 7.0 and 7.1, each as eax, ebx, ecx, edx, then 0x80000001's ecx, and what is saved. */
EXPORT void processor_features(u64* found) {
  u32 r[4], most, most_extended;
  cpuid(0, 0, r);
  most = r[0];
  cpuid(0x80000000u, 0, r);
  most_extended = r[0];
  static const u32 leaves[3][2] = {{1, 0}, {7, 0}, {7, 1}};
  for (int k = 0; k < 3; k++) {
    r[0] = r[1] = r[2] = r[3] = 0;
    if (leaves[k][0] <= most) cpuid(leaves[k][0], leaves[k][1], r);
    for (int i = 0; i < 4; i++) found[4 * k + i] = r[i];
  }
  r[2] = 0;
  if (most_extended >= 0x80000001u) cpuid(0x80000001u, 0, r);
  found[12] = r[2];
  found[13] = saved_registers();
}

#else

extern unsigned long getauxval(unsigned long);

/* AT_HWCAP, AT_HWCAP2. */
EXPORT void processor_features(u64* found) {
  for (int k = 0; k < 14; k++) found[k] = 0;
  found[0] = getauxval(16);
  found[1] = getauxval(26);
}

#endif
