/* Copies whole blocks from one pool to another, with a checksum of each (formula: kernels/kv/transfer_blocks.py).
 * If `to` is null, it only computes the checksums. */
#include "simd/cpu_class.h"
#include "simd/scalar.h"

#define LANES 8
#define LINE (LANES * (int64_t)sizeof(uint64_t))
#define PARALLEL_FROM 131072 /* a call with this many bytes uses several threads */

static uint64_t transfer_block(const char *from, char *to, int64_t lines) {
    uint64_t plain[LANES] = {0}, weighted[LANES] = {0}, sum = 0;
    for (int64_t i = 0; i < lines; i++) {
        uint64_t words[LANES];
        memcpy(words, from + i * LINE, LINE);
        if (to) memcpy(to + i * LINE, words, LINE);
        for (int l = 0; l < LANES; l++) plain[l] += words[l], weighted[l] += plain[l];
    }
    for (uint64_t l = 0; l < LANES; l++)
        sum += plain[l] * (2 * l + 0x9E3779B97F4A7C15) + weighted[l] * (4 * l + 0xC2B2AE3D27D4EB4E);
    return sum;
}

void FOR_CLASS(transfer_blocks)(const void *from, int64_t from_stride, const int64_t *from_rows, void *to, int64_t to_stride,
                     const int64_t *to_rows, int64_t bytes, int64_t count, int64_t *sums) {
#pragma omp parallel for schedule(static) if (count > 1 && count * bytes >= PARALLEL_FROM)
    for (int64_t i = 0; i < count; i++)
        sums[i] = (int64_t)transfer_block((const char *)from + from_rows[i] * from_stride,
                                          to ? (char *)to + to_rows[i] * to_stride : 0, bytes / LINE);
}
