/* The library's version, and whether this processor can run its AVX512-BF16 functions. */

/* Raised with every change of a signature or a struct: the Python side refuses a library that was built before. */
int native_version(void) { return 9; }

int has_avx512_bf16(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
#else
    return 0;
#endif
}
