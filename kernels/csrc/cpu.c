/* The library's version, and which instruction classes this processor and its operating system can run. */
#include <string.h>

/* Raised with every change of a signature or a struct: the Python side refuses a library that was built before. */
int native_version(void) { return 22; }

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* A register of an answer of CPUID's leaf 7. */
enum { EAX, EBX, ECX, EDX };
static unsigned feature_bits(unsigned subleaf, int which) {
    unsigned found[4];
    if (!__get_cpuid_count(7, subleaf, found + EAX, found + EBX, found + ECX, found + EDX)) return 0;
    return found[which];
}

static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

/* The name that GCC 11 does not know yet. */
static int has_avx2_vnni(void) {
    const unsigned avx_vnni = 1u << 4;
    return has_avx2() && (feature_bits(1, EAX) & avx_vnni);
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int has_avx512_vnni(void) { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

static int has_avx512_bf16(void) { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

/* Linux gives the tiles' state, 8 KiB for each thread, only to processes that ask for it. */
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
    return has_avx512_bf16() && (feature_bits(0, EDX) & needed) == needed && may_use_tiles();
}

/* Whether the kernels of a class of setup.py can run here. Asks for AMX's state if `name` is "amx". */
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
