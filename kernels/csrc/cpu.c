/* The library's version, and which instruction classes this processor and its operating system can run. */
#include <string.h>

/* Increase this with every change of a signature or a struct: kernels/native.py refuses a library with another
 * version. */
int native_version(void) { return 27; }

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* __builtin_cpu_supports also checks that the operating system saves the registers. A compiler refuses a feature name
 * that it does not know, but then the library must still build, without that class. So features that GCC 9 does not
 * know are read from CPUID, after a builtin has checked their registers. */
enum { EAX, EBX, ECX, EDX };
static unsigned cpuid(unsigned leaf, unsigned subleaf, int which) {
    unsigned found[4];
    if (!__get_cpuid_count(leaf, subleaf, found + EAX, found + EBX, found + ECX, found + EDX)) return 0;
    return found[which];
}

/* Subleaf 0 has the largest subleaf in EAX. It is checked, because some processors answer a missing subleaf with the
 * bits of another one. */
static unsigned cpuid_7_1(void) { return cpuid(7, 0, EAX) >= 1 ? cpuid(7, 1, EAX) : 0; }

static int has_avx2(void) {
    const unsigned f16c = 1u << 29;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (cpuid(1, 0, ECX) & f16c);
}

static int has_avx2_vnni(void) {
    const unsigned avx_vnni = 1u << 4;
    return has_avx2() && (cpuid_7_1() & avx_vnni);
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int has_avx512_vnni(void) { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

static int has_avx512_bf16(void) {
    const unsigned bf16 = 1u << 5;
    return has_avx512_vnni() && (cpuid_7_1() & bf16);
}

/* Linux lets only a process that has asked for them use AMX's tile registers (8 KiB of state for each thread). */
static int may_use_tiles(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

static int has_amx(void) {
    const unsigned needed = 1u << 22 | 1u << 24; /* AMX-BF16 and AMX-TILE */
    return has_avx512_bf16() && (cpuid(7, 0, EDX) & needed) == needed && may_use_tiles();
}

/* Whether the kernels of a class of setup.py can run here. For "amx" it also asks Linux for the tile registers. */
int has_class(const char *name) {
    __builtin_cpu_init();
    if (!strcmp(name, "avx2")) return has_avx2();
    if (!strcmp(name, "avx2_vnni")) return has_avx2_vnni();
    if (!strcmp(name, "avx512")) return has_avx512();
    if (!strcmp(name, "avx512_vnni")) return has_avx512_vnni();
    if (!strcmp(name, "avx512_bf16")) return has_avx512_bf16();
    if (!strcmp(name, "amx")) return has_amx();
    return !strcmp(name, "generic");
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

int has_class(const char *name) {
    const unsigned long bf16 = 1ul << 14; /* HWCAP2_BF16 */
    if (!strcmp(name, "neon_bf16")) return (getauxval(AT_HWCAP2) & bf16) != 0;
    return !strcmp(name, "generic");
}
#else
int has_class(const char *name) { return !strcmp(name, "generic"); }
#endif
