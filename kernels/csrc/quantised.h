/* Weights of 8 or 4 bits, unpacked as they are multiplied: weight = (code - zero) * scale, computed in float32.
 *
 * If bfloat16 is multiplied as floats (HAS_DOT is 0), x is multiplied with (code - zero), and the sum of each group
 * with the group's scale: y = sum over groups of scale * sum of (code - zero) * x. That saves an instruction for each
 * vector of codes, and rounds less. In the classes from avx2 to avx512_bf16 codes of INT8, INT4 and FP4 are multiplied
 * as integers (integer_rows.h). In the class avx512_bf16 codes of FP8, each of which is a bfloat16, are multiplied as
 * pairs of bfloat16, and the sums with the scales.
 *
 * The codes of a packed weight are words [panels][depth / codes of a word][PANEL]. The codes of a word are consecutive
 * along the depth, the first in the lowest bits. Zero codes pad the depth to whole tiles of AMX. Scales and zero points
 * are [panels][groups][PANEL]: `group` consecutive codes along the depth share one. A group is a multiple of 8, or the
 * whole depth. Zero points of INT8 are whole numbers; those of a float type may be fractions. */
#pragma once
#include "simd/vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PANEL 16
#define TILE_WORDS 16
#define VECTORS (PANEL / LANES) /* vectors of a panel */
#define MOST_VECTORS 4          /* vectors of features that a tile of few rows takes */
#define CODES_AHEAD 12          /* words prefetched ahead where one tile reads all of the depth */

/* How a weight is stored, numbered as in kernels/layers/quantised_weight.py. FP8 is e4m3, FP4 is e2m1. */
enum { PLAIN = 0, CODES_INT8 = 1, CODES_INT4 = 2, CODES_FP8 = 3, CODES_FP4 = 4 };
/* A type of scales besides BF16, F32, F16 and FP8 (e4m3): a byte e stands for 2^(e - 127). */
enum { E8M0 = 6 };

typedef struct {
    const void *packed; /* plain: linear.h; quantised: the codes */
    const void *bias;   /* [features] or null */
    int64_t features, depth;
    const void *scales;
    const float *row_scales; /* [panels][PANEL]: what the scales of a feature are multiplied with; null: 1 */
    const void *zeros;       /* zero points of integer codes; null: all are 0 */
    const int32_t *order;    /* [depth]: the column of x for each column of codes; null: the same column */
    int64_t kind, group, scale_type, zero_type; /* zero_type: INT8, F32, BF16 or F16 */
} Weight;

INLINE int64_t codes_of_word(int64_t kind) { return kind == CODES_INT4 || kind == CODES_FP4 ? 8 : 4; }
/* Bytes of a scale or a zero point. */
INLINE int64_t scale_bytes(int64_t type) { return type == E8M0 || type == FP8 || type == INT8 ? 1 : type == F32 ? 4 : 2; }
INLINE int64_t groups_of(const Weight *w) { return (w->depth + w->group - 1) / w->group; }
INLINE int64_t padded_depth(int64_t depth) { return (depth + 2 * TILE_WORDS - 1) / (2 * TILE_WORDS) * 2 * TILE_WORDS; }

/* The codes of a word, split up so that number_of needs few instructions per code. For FP8: `even` holds codes 0 and 2
 * as a pair of bfloat16, `odd` codes 1 and 3, times FACTOR(CODES_FP8). */
typedef struct {
    Words even, odd;
} Codes;

#if defined(__AVX512F__)
/* e4m3 codes as bfloat16, each taken for a normal number. `fields`: the codes' bits, shifted to where bfloat16 has them.
 * Rebiases the exponent by 120. */
INLINE Shorts as_if_normal(Shorts fields) { return (fields & (Shorts)((Words){} + 0x87F087F0u)) + (120 << 7); }

/* Corrects the subnormal codes (exponent 0, no implicit one) of as_if_normal's `x` with a table. `codes`: the code in the
 * lower byte of each 16 bits, anything in the upper one. */
INLINE Shorts with_subnormals(Shorts x, Shorts codes) {
    /* For code i: the bits of i * 2^-9 less those of (8 + i) * 2^-10. */
    const __m512i change = _mm512_setr_epi32(0xFEF0C400, 0xFF90FF60, 0xFFD0FFC0, 0xFFF0FFE0, 0, 0, 0, 0, 0,
                                             0, 0, 0, 0, 0, 0, 0);
    const __mmask32 is_small = _mm512_testn_epi16_mask((__m512i)codes, _mm512_set1_epi16(0x0078));
    return x + (Shorts)_mm512_maskz_permutexvar_epi16(is_small, (__m512i)codes, change);
}

INLINE Codes part_codes(Words words, const int kind) {
    if (kind != CODES_FP8) return (Codes){words, words};
    const Shorts codes = (Shorts)words, upper = (Shorts)((UnsignedShorts)words >> 8);
    return (Codes){(Words)with_subnormals(as_if_normal(codes << 8 >> 4), codes),
                   (Words)with_subnormals(as_if_normal(codes >> 4), upper)};
}

/* Code i of each word as a number times FACTOR(kind). */
INLINE Floats number_of(Codes codes, const int i, const int kind) {
    const Words words = codes.even;
    if (kind == CODES_INT8) return __builtin_convertvector((Ints)(words << (24 - 8 * i)) >> 24, Floats);
    if (kind == CODES_INT4 || kind == CODES_FP4) { /* the lookup instruction reads only the lowest four bits */
        const __m512 table = kind == CODES_INT4
                                 ? _mm512_set_ps(-1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0)
                                 : _mm512_set_ps(-12, -8, -6, -4, -3, -2, -1, -0.0f, 12, 8, 6, 4, 3, 2, 1, 0);
        return (Floats)_mm512_permutexvar_ps((__m512i)(words >> (4 * i)), table);
    }
    const Words part = i % 2 ? codes.odd : codes.even;
    return i < 2 ? low_of(part) : high_of(part);
}
#define FACTOR(KIND) ((KIND) == CODES_FP4 ? 2.0f : 1.0f)
#else
/* Moves byte i of each word to the highest byte; the others become 0. */
INLINE Words highest_byte(Words words, const int i) {
    if (i == 0) return words << 24;
    if (i == 3) return words & 0xFF000000u;
#if defined(__AVX2__)
    const __m256i to = _mm256_add_epi32(_mm256_setr_epi32(0x00FFFFFF, 0x04FFFFFF, 0x08FFFFFF, 0x0CFFFFFF, 0x00FFFFFF,
                                                          0x04FFFFFF, 0x08FFFFFF, 0x0CFFFFFF),
                                        _mm256_set1_epi32(i << 24)); /* 255: a zero */
    return (Words)_mm256_shuffle_epi8((__m256i)words, to);
#else
    return words << (24 - 8 * i) & 0xFF000000u;
#endif
}

/* Codes of 4 bits become bytes: an integer in the upper half of its byte, an FP4 as twice its number. A shift makes an
 * e4m3 a bfloat16, whose bias makes it 2^-120 times the number, subnormal ones too. */
INLINE Codes part_codes(Words words, const int kind) {
    if (kind == CODES_INT4) return (Codes){(words << 4) & 0xF0F0F0F0u, words & 0xF0F0F0F0u};
    if (kind == CODES_FP8)
        return (Codes){(Words)(((Shorts)words << 8) >> 4) & 0x87F087F0u, (Words)((Shorts)words >> 4) & 0x87F087F0u};
#if defined(__AVX2__)
    if (kind == CODES_FP4) {
        const __m256i twice = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
        return (Codes){(Words)_mm256_shuffle_epi8(twice, (__m256i)(words & 0x0F0F0F0Fu)),
                       (Words)_mm256_shuffle_epi8(twice, (__m256i)((words >> 4) & 0x0F0F0F0Fu))};
    }
#endif
    return (Codes){words, words};
}

/* Code i of each word as a number times FACTOR(kind). */
INLINE Floats number_of(Codes codes, const int i, const int kind) {
    if (kind == CODES_INT8) return __builtin_convertvector((Ints)highest_byte(codes.even, i), Floats);
    const Words part = i % 2 ? codes.odd : codes.even;
    if (kind == CODES_FP8) return i < 2 ? low_of(part) : high_of(part);
#if !defined(__AVX2__)
    if (kind == CODES_FP4) {
        const Words index = part >> (4 * i), twice = (((Words){} + 0xC8643210u) >> ((index & 7) << 2)) & 15;
        const Ints sign = (Ints)(index << 28) >> 31;
        return __builtin_convertvector((((Ints)twice ^ sign) - sign) << 24, Floats);
    }
#endif
    return __builtin_convertvector((Ints)highest_byte(part, i / 2), Floats);
}
#define FACTOR(KIND) \
    ((KIND) == CODES_INT8 ? 0x1p24f : (KIND) == CODES_INT4 ? 0x1p28f : (KIND) == CODES_FP4 ? 0x1p25f : 0x1p-120f)
#endif

/* The factor of x before products with number_of, so that products with FP8 do not become subnormal. */
INLINE float factor_of_x(int64_t kind) { return kind == CODES_FP8 && FACTOR(CODES_FP8) < 1 ? 0x1p60f : 1.0f; }

/* Whether linear.c multiplies the pairs of bfloat16 that part_codes makes of FP8. It then multiplies all other kinds as
 * integers. linear_amx.c does neither. */
#ifdef __AVX512BF16__
#define HAS_CODE_PAIRS 1
#else
#define HAS_CODE_PAIRS 0
#endif

/* Loads LANES bytes, or float16 numbers, one per lane. The compiler would load them one by one. */
#if defined(__AVX512F__)
INLINE Words load_bytes(const void *from) { return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(from)); }
INLINE Floats load_f16(const void *from) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(from)); }
#elif defined(__AVX2__)
INLINE Words load_bytes(const void *from) { return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(from)); }
INLINE Floats load_f16(const void *from) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(from)); }
#else
INLINE Words load_bytes(const void *from) {
    Words found;
    for (int j = 0; j < LANES; j++) found[j] = ((const uint8_t *)from)[j];
    return found;
}
INLINE Floats load_f16(const void *from) {
    Floats found;
    for (int j = 0; j < LANES; j++) found[j] = from_f16(((const uint16_t *)from)[j]);
    return found;
}
#endif

INLINE Floats load_scales(const void *scales, int64_t at, int64_t type) {
    if (type == F32) return load_floats((const float *)scales + at);
    if (type == BF16) return load_bf16((const uint16_t *)scales + at);
    if (type == F16) return load_f16((const uint16_t *)scales + at);
    const Words byte = load_bytes((const uint8_t *)scales + at);
    /* A shift makes an e4m3 a float32, whose bias makes it 2^-120 times the number, subnormal ones too. */
    if (type == FP8) return (Floats)((Words)((Ints)(byte << 24) >> 4) & 0x87F00000u) * 0x1p120f;
    const Words bits = byte << 23;
    return (Floats)(bits | ((Words)((bits == 0) | (bits == 0x7F800000u)) & 0x00400000u)); /* 255: NaN */
}

/* Where the scales and zero points of `group` are, for vector v of the panels from `panel` on. */
INLINE int64_t place_of_scales(int64_t groups, int64_t panel, int64_t group, int64_t v) {
    return ((panel + v / VECTORS) * groups + group) * PANEL + v % VECTORS * LANES;
}

/* What scales are multiplied with, for vector v of the panels from `panel` on. */
INLINE Floats row_scales_of(const Weight *w, int64_t panel, int64_t v) {
    return w->row_scales ? load_floats(w->row_scales + panel * PANEL + v * LANES) : (Floats){} + 1.0f;
}

/* The scales of `group`, rounded to float32, for vector v of the panels from `panel` on. */
INLINE Floats scales_of(const Weight *w, int64_t groups, int64_t panel, int64_t group, int64_t v) {
    return load_scales(w->scales, place_of_scales(groups, panel, group, v), w->scale_type) * row_scales_of(w, panel, v);
}

INLINE Floats load_zeros(const Weight *w, int64_t at) {
    if (w->zero_type != INT8) return load_scales(w->zeros, at, w->zero_type);
    return __builtin_convertvector((Ints)(load_bytes((const int8_t *)w->zeros + at) << 24) >> 24, Floats);
}

/* A pair of bfloat16 in each lane, rounded to nearest. */
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

/* What unpack writes: the weight as pairs of bfloat16, or as floats, or (code - zero) * FACTOR as floats, or the pairs
 * of part_codes. */
enum { WEIGHT_PAIRS, WEIGHT_FLOATS, NUMBERS, CODE_PAIRS };
INLINE int64_t values_of_form(int form) { return form == WEIGHT_PAIRS || form == CODE_PAIRS ? 2 : 1; }

/* Unpacks one panel, depth [from, to), multiples of 2 * TILE_WORDS, to pairs [(to - from) / 2][PANEL] or to floats
 * [to - from][PANEL]. */
INLINE void unpack_panel(const Weight *w, int64_t panel, int64_t from, int64_t to, const int kind, const int has_zeros,
                         const int form, uint32_t *unpacked) {
    const int64_t per_word = codes_of_word(kind), groups = groups_of(w);
    const uint32_t *codes = (const uint32_t *)w->packed + panel * (padded_depth(w->depth) / per_word) * PANEL;
    const int is_scaled = form == WEIGHT_PAIRS || form == WEIGHT_FLOATS;
    /* The inverse of FP8's factor would make large scales infinite. */
    const float undone = kind == CODES_FP8 && is_scaled ? 1 / FACTOR(kind) : 1, left = undone * FACTOR(kind);
    for (int64_t k = from; k < to;) {
        const int64_t group = min_i64(k / w->group, groups - 1);
        const int64_t last = group == groups - 1 ? to : min_i64(to, (group + 1) * w->group);
        Floats scale[VECTORS] = {{0}}, zero[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            if (is_scaled) scale[v] = scales_of(w, groups, panel, group, v) * (1 / left);
            if (has_zeros) zero[v] = load_zeros(w, place_of_scales(groups, panel, group, v)) * left;
        }
        for (; k < last; k += per_word) {
            uint32_t *row = unpacked + (k - from) / values_of_form(form) * PANEL;
            /* Prefetches the next part at the same offset: the hardware prefetcher does not follow that jump. */
            const uint32_t *next = codes + (k + to - from) / per_word * PANEL;
            if (LANES == 16 && !is_scaled) prefetch_to_l2(next); /* on a Zen 4 9 to 32 rows are 6 to 8% faster */
            else __builtin_prefetch(next);
            for (int v = 0; v < VECTORS; v++) {
                const Codes parts = part_codes(load_words(codes + k / per_word * PANEL + v * LANES), kind);
                if (form == CODE_PAIRS) {
                    memcpy(row + v * LANES, &parts.even, sizeof parts.even);
                    memcpy(row + PANEL + v * LANES, &parts.odd, sizeof parts.odd);
                    continue;
                }
#pragma GCC unroll 4
                for (int i = 0; i < 8; i += 2) {
                    if (i >= (kind == CODES_INT4 || kind == CODES_FP4 ? 8 : 4)) break;
                    Floats low = number_of(parts, i, kind) * undone, high = number_of(parts, i + 1, kind) * undone;
                    if (has_zeros) low -= zero[v], high -= zero[v];
                    if (is_scaled) low *= scale[v], high *= scale[v];
                    if (form == WEIGHT_PAIRS) {
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

/* Unpacks `panels` panels from `panel` on, contiguously. */
INLINE void unpack(const Weight *w, int64_t panel, int64_t panels, int64_t from, int64_t to, const int form,
                   uint32_t *unpacked) {
    const int64_t size = (to - from) / values_of_form(form) * PANEL;
#define UNPACK(KIND, HAS_ZEROS) \
    for (int64_t p = 0; p < panels; p++) \
        unpack_panel(w, panel + p, from, to, KIND, HAS_ZEROS, form, unpacked + p * size);
    if (w->kind == CODES_FP8) UNPACK(CODES_FP8, 0)
    else if (w->kind == CODES_FP4) UNPACK(CODES_FP4, 0)
    else if (w->kind == CODES_INT8 && w->zeros) UNPACK(CODES_INT8, 1)
    else if (w->kind == CODES_INT8) UNPACK(CODES_INT8, 0)
    else if (w->zeros) UNPACK(CODES_INT4, 1)
    else UNPACK(CODES_INT4, 0)
#undef UNPACK
}

/* The scales that sums of `group` are multiplied with: vector v of the panels from `panel` on. */
INLINE Floats scale_of_sums(const Weight *w, int64_t panel, int64_t group, int64_t v, const int kind) {
    return scales_of(w, groups_of(w), panel, group, v) * (1 / (FACTOR(kind) * factor_of_x(kind)));
}

/* sums[m][n] += x [padded depth][m], times factor_of_x, times n vectors of features from `panel` on. With
 * HAS_CODE_PAIRS x is [padded depth / 2][m] pairs. Codes are unpacked in registers, because for few rows an unpacked
 * copy costs more than it saves. m, n, kind and has_zeros are constants at every call. */
INLINE void code_tile(const int m, const int n, const int kind, const int has_zeros, const Weight *w, int64_t panel,
                      const float *x, Floats *sums) {
    const int per_word = kind == CODES_INT4 || kind == CODES_FP4 ? 8 : 4, steps = HAS_CODE_PAIRS ? 2 : per_word;
    const int64_t depth = padded_depth(w->depth), stride = depth / per_word * PANEL;
    const int64_t groups = groups_of(w);
    const uint32_t *codes = (const uint32_t *)w->packed + panel * stride;
    for (int64_t group = 0, k = 0; group < groups; group++) {
        Floats sum[ACCUMULATORS], zero[MOST_VECTORS];
        for (int i = 0; i < m * n; i++) sum[i] = (Floats){};
        for (int j = 0; j < n && has_zeros; j++)
            zero[j] = load_zeros(w, place_of_scales(groups, panel, group, j)) * FACTOR(kind);
        const int64_t last = group == groups - 1 ? depth : (group + 1) * w->group;
        for (; k < last; k += per_word, codes += PANEL, x += steps * m) {
            Codes parts[MOST_VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) {
                const uint32_t *at = codes + j / VECTORS * stride + j % VECTORS * LANES;
                parts[j] = part_codes(load_words(at), kind);
                if (j % VECTORS) continue;
                /* Calls of more rows are compute-bound, and slower with the codes in L2. */
                if (LANES == 16 && n == MOST_VECTORS) prefetch_to_l2(at + CODES_AHEAD * PANEL);
                else __builtin_prefetch(at + CODES_AHEAD * PANEL);
            }
            /* With 16 registers the compiler would otherwise keep these in registers and spill the sums. */
            if (LANES <= 8 && (per_word == 8 || m > 1)) __asm__("" : "+m"(parts));
#pragma GCC unroll 8
            for (int i = 0; i < steps; i++)
#pragma GCC unroll 4
                for (int j = 0; j < n; j++) {
#pragma GCC unroll 8
                    for (int r = 0; r < m && HAS_CODE_PAIRS; r++) {
                        const Words pair = i ? parts[j].odd : parts[j].even;
                        sum[r * n + j] = add_dot(sum[r * n + j], pair, (Words){} + to_bits(x[i * m + r]));
                    }
                    if (HAS_CODE_PAIRS) continue;
                    const Floats number = number_of(parts[j], i, kind) - (has_zeros ? zero[j] : (Floats){});
#pragma GCC unroll 12
                    for (int r = 0; r < m; r++) sum[r * n + j] += number * x[i * m + r];
                }
        }
        for (int j = 0; j < n; j++) {
            const Floats scale = scale_of_sums(w, panel, group, j, kind);
            for (int r = 0; r < m; r++) sums[r * n + j] += sum[r * n + j] * scale;
        }
    }
}
