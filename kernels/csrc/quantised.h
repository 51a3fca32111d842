/* Weights of 8 or 4 bits, unpacked as they are multiplied: weight = (code - zero) * scale, computed in float32.
 *
 * The codes of a packed weight are [panels][depth / codes of a word][PANEL] words of neighbours along the depth, the first
 * in the lowest bits. Zero codes fill up the depth to whole tiles of AMX. Scales and zero points are
 * [panels][groups][PANEL]: `group` neighbours along the depth share one. A group is a multiple of 8, or all of the depth. */
#pragma once
#include "simd/vectors.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define PANEL 16
#define TILE_WORDS 16
#define VECTORS (PANEL / LANES) /* of a panel */

/* What a weight is stored as, numbered as in kernels/layers/quantised_weight.py. FP8 is e4m3; FP4 is e2m1. */
enum { PLAIN = 0, CODES_INT8 = 1, CODES_INT4 = 2, CODES_FP8 = 3, CODES_FP4 = 4 };
/* Types of scales besides BF16, F32 and F16: an exponent e in a byte stands for 2^(e - 127). */
enum { E8M0 = 6 };

typedef struct {
    const void *packed; /* plain: linear.h; quantised: the codes */
    const void *bias;   /* [features] or null */
    int64_t features, depth;
    const void *scales;
    const int8_t *zeros;  /* of integers; null: all are 0 */
    const int32_t *order; /* [depth]: the columns of x in the order of the codes; null: as they are */
    int64_t kind, group, scale_type;
} Weight;

INLINE int64_t codes_of_word(int64_t kind) { return kind == CODES_INT4 || kind == CODES_FP4 ? 8 : 4; }
INLINE int64_t scale_bytes(int64_t type) { return type == E8M0 ? 1 : type == F32 ? 4 : 2; }
INLINE int64_t padded_depth(int64_t depth) { return (depth + 2 * TILE_WORDS - 1) / (2 * TILE_WORDS) * 2 * TILE_WORDS; }

/* Code i of each word, as a number. FP4 codes are doubled. */
INLINE Floats code_of(Words words, const int i, const int kind) {
    const Words sign_bit = (Words){} + 0x80000000u;
    if (kind == CODES_INT8) return __builtin_convertvector((Ints)(words << (24 - 8 * i)) >> 24, Floats);
#if defined(__AVX512F__)
    if (kind == CODES_INT4 || kind == CODES_FP4) { /* the instruction looks at the lowest four bits only */
        const __m512 table = kind == CODES_INT4
                                 ? _mm512_set_ps(-1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0)
                                 : _mm512_set_ps(-12, -8, -6, -4, -3, -2, -1, -0.0f, 12, 8, 6, 4, 3, 2, 1, 0);
        return (Floats)_mm512_permutexvar_ps((__m512i)(words >> (4 * i)), table);
    }
#endif
    if (kind == CODES_INT4) return __builtin_convertvector((Ints)(words << (28 - 4 * i)) >> 28, Floats);
    if (kind == CODES_FP4) {
        const Words index = words >> (4 * i), shifts = (index & 7) << 2;
        const Words twice = (((Words){} + 0xC8643210u) >> shifts) & 15;
        return (Floats)((Words)__builtin_convertvector((Ints)twice, Floats) | ((index << 28) & sign_bit));
    }
    /* The fields of e4m3 fit after a shift, with another bias. Where the exponent is 0 there is no leading one. */
    const Words byte = words << (24 - 8 * i), sign = byte & sign_bit, rest = (byte >> 4) & 0x07F00000u;
    const Words is_small = (Words)(rest < 0x00800000u);
    const Floats leading = (Floats)(is_small & (121u << 23));
    const Floats value = (Floats)(rest + (120u << 23) + (is_small & (1u << 23))) - leading;
    return (Floats)((Words)value | sign);
}

INLINE Floats load_scales(const void *scales, int64_t at, int64_t type) {
    float found[LANES];
    if (type == F32) return load_floats((const float *)scales + at);
    if (type == BF16) return load_bf16((const uint16_t *)scales + at);
    for (int j = 0; j < LANES; j++) {
        const uint32_t exponent = type == E8M0 ? ((const uint8_t *)scales)[at + j] : 0;
        found[j] = type == F16 ? from_f16(((const uint16_t *)scales)[at + j])
                               : from_bits(exponent ? exponent << 23 : 0x00400000u);
    }
    return load_floats(found);
}

/* A word of pairs of bfloat16 for each lane, rounded to nearest. */
INLINE Words pairs_of(Floats low, Floats high) {
#ifdef __AVX512BF16__
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Words)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
    const Words a = (Words)low, b = (Words)high;
    return ((a + 0x7FFF + ((a >> 16) & 1)) >> 16) | ((b + 0x7FFF + ((b >> 16) & 1)) & 0xFFFF0000u);
#endif
}

/* Unpacks one panel, depth [from, to), multiples of 2 * TILE_WORDS, to bfloat16 pairs [(to - from) / 2][PANEL] or to
 * floats [to - from][PANEL]. */
INLINE void unpack_panel(const Weight *w, int64_t panel, int64_t from, int64_t to, const int kind, const int has_zeros,
                         const int as_pairs, uint32_t *unpacked) {
    const int64_t per_word = codes_of_word(kind), groups = (w->depth + w->group - 1) / w->group;
    const uint32_t *codes = (const uint32_t *)w->packed + panel * (padded_depth(w->depth) / per_word) * PANEL;
    for (int64_t k = from; k < to;) {
        const int64_t group = min_i64(k / w->group, groups - 1), first = (panel * groups + group) * PANEL;
        const int64_t last = group == groups - 1 ? to : min_i64(to, (group + 1) * w->group);
        Floats scale[VECTORS], zero[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            scale[v] = load_scales(w->scales, first + v * LANES, w->scale_type) * (kind == CODES_FP4 ? 0.5f : 1.0f);
            if (has_zeros)
                for (int j = 0; j < LANES; j++) zero[v][j] = w->zeros[first + v * LANES + j];
        }
        for (; k < last; k += per_word) {
            uint32_t *row = unpacked + (k - from) / (as_pairs ? 2 : 1) * PANEL;
            /* The same place of the next part: the processor does not see that the reads go on there. */
            __builtin_prefetch(codes + (k + to - from) / per_word * PANEL);
            for (int v = 0; v < VECTORS; v++) {
                const Words words = load_words(codes + k / per_word * PANEL + v * LANES);
#pragma GCC unroll 4
                for (int i = 0; i < 8; i += 2) {
                    if (i >= (kind == CODES_INT4 || kind == CODES_FP4 ? 8 : 4)) break;
                    Floats low = code_of(words, i, kind), high = code_of(words, i + 1, kind);
                    if (has_zeros) low -= zero[v], high -= zero[v];
                    low *= scale[v], high *= scale[v];
                    if (as_pairs) {
                        const Words pairs = pairs_of(low, high);
                        memcpy(row + i / 2 * PANEL + v * LANES, &pairs, sizeof pairs);
                    } else {
                        store_floats((float *)row + i * PANEL + v * LANES, low);
                        store_floats((float *)row + (i + 1) * PANEL + v * LANES, high);
                    }
                }
            }
        }
    }
}

/* Unpacks `panels` panels from `panel` on, one behind the other. */
INLINE void unpack(const Weight *w, int64_t panel, int64_t panels, int64_t from, int64_t to, const int as_pairs,
                   uint32_t *unpacked) {
    const int64_t size = (to - from) / (as_pairs ? 2 : 1) * PANEL;
#define UNPACK(KIND, HAS_ZEROS) \
    for (int64_t p = 0; p < panels; p++) \
        unpack_panel(w, panel + p, from, to, KIND, HAS_ZEROS, as_pairs, unpacked + p * size);
    if (w->kind == CODES_FP8) UNPACK(CODES_FP8, 0)
    else if (w->kind == CODES_FP4) UNPACK(CODES_FP4, 0)
    else if (w->kind == CODES_INT8 && w->zeros) UNPACK(CODES_INT8, 1)
    else if (w->kind == CODES_INT8) UNPACK(CODES_INT8, 0)
    else if (w->zeros) UNPACK(CODES_INT4, 1)
    else UNPACK(CODES_INT4, 0)
#undef UNPACK
}
