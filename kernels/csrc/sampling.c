/* Sampling, penalties, masks and log-probabilities on float32 logits. Formulas and shapes are in the Python
 * files of kernels/sampling. Nothing is sorted: the k-th largest value, or the value at which a mass is reached,
 * is found by three histograms (radix select), over the highest 11 bits of the floats' ordered keys, the next 11
 * and the last 10. */
#include <stdlib.h>

#include "simd/cpu_class.h"
#include "simd/scalar.h"

#define NOISE_TILE 256 /* noise is computed for this many tokens at a time */

INLINE uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

INLINE uint32_t murmur(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

static uint64_t row_key(int64_t seed, int32_t choice, int64_t position) {
    const uint64_t golden = 0x9E3779B97F4A7C15ull;
    uint64_t key = mix((uint64_t)seed + golden);
    key = mix(key ^ ((uint64_t)(int64_t)choice + golden));
    return mix(key ^ ((uint64_t)position + golden));
}

INLINE uint32_t token_bits(uint64_t key, uint32_t token) {
    return murmur(murmur(token * 0x9E3779B1u ^ (uint32_t)key) + (uint32_t)(key >> 32));
}

INLINE float gumbel(uint32_t bits) {
    float u = ((float)bits + 0.5f) * 0x1p-32f;
    u = u > 1.0f - 0x1p-24f ? 1.0f - 0x1p-24f : u;
    float series = u + 0.5f * u * u, whole = -log_(1.0f - u);
    return -log_(u < 0x1p-10f ? series : whole);
}

/* An integer key that compares as x does. 0 and -0 are equal. A NaN is the largest, as in torch.topk. */
INLINE uint32_t ordered(float x) {
    uint32_t bits = to_bits(x + 0.0f);
    return x != x ? 0xFFFFFFFFu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

INLINE float unordered(uint32_t key) { return from_bits(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }

INLINE float highest(const float *x, int64_t n) {
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

INLINE int64_t first_of(const float *x, int64_t n, float value) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] == value) return i;
    return 0;
}

static const int shifts[] = {21, 10, 0}, widths[] = {2048, 2048, 1024};

/* The k-th largest of x (1 <= k <= n). */
INLINE float kth_largest(const float *x, int64_t n, int64_t k) {
    uint32_t prefix = 0, known = 0;
    for (int pass = 0; pass < 3; pass++) {
        int32_t count[2048] = {0};
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = ordered(x[i]);
            if ((key & known) == prefix) count[(key >> shifts[pass]) & (widths[pass] - 1)]++;
        }
        int bin = widths[pass] - 1;
        while (bin > 0 && count[bin] < k) k -= count[bin--];
        prefix |= (uint32_t)bin << shifts[pass];
        known |= (uint32_t)(widths[pass] - 1) << shifts[pass];
    }
    return unordered(prefix);
}

/* The mass of a token. `weight`: exp(x - top). Masses are integers, so that sums do not depend on their order. NaN has
 * mass 0. */
INLINE int64_t mass_of(float weight) { return weight > 0 ? (int64_t)(weight * 0x1p40f) : 0; }

/* The largest v for which the mass of {x >= v} reaches `share` of the total mass. If n > `most`, the total mass leaves
 * out n - most values, which are equal and have the weight `least_weight`. */
INLINE float mass_floor(const float *x, const float *weight, int64_t n, int64_t most, float least_weight, double share) {
    uint32_t prefix = 0, known = 0;
    int64_t goal = 0;
    for (int pass = 0; pass < 3; pass++) {
        int64_t mass[2048] = {0};
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = ordered(x[i]);
            if ((key & known) == prefix) mass[(key >> shifts[pass]) & (widths[pass] - 1)] += mass_of(weight[i]);
        }
        if (pass == 0) {
            int64_t whole = n > most ? (most - n) * mass_of(least_weight) : 0;
            for (int bin = 0; bin < widths[0]; bin++) whole += mass[bin];
            goal = (int64_t)ceil(share * (double)whole);
            goal = goal > 1 ? goal : 1;
        }
        int bin = widths[pass] - 1;
        for (; bin > 0 && mass[bin] < goal; bin--) goal -= mass[bin];
        prefix |= (uint32_t)bin << shifts[pass];
        known |= (uint32_t)(widths[pass] - 1) << shifts[pass];
    }
    return unordered(prefix);
}

/* The floor of x = logits / temperature: the filters keep the values that are at least the floor. `top`: the largest x.
 * `scratch`: 2 * vocab floats. */
INLINE float floor_of(const float *x, int64_t vocab, float top, int64_t top_k, float top_p, float min_p, float *scratch) {
    float *kept = scratch, *weight = scratch + vocab, floor = -INFINITY;
    if (min_p > 0) floor = top + logf(min_p);
    if (top_k > 0 && top_k < vocab) {
        float kth = kth_largest(x, vocab, top_k);
        floor = kth > floor ? kth : floor;
    }
    if (top_p < 1) {
        int64_t n = 0;
        for (int64_t i = 0; i < vocab; i++) {
            kept[n] = x[i];
            n += x[i] >= floor;
        }
#pragma omp simd
        for (int64_t i = 0; i < n; i++) weight[i] = exp_(kept[i] - top);
        int64_t most = top_k > 0 && top_k < vocab ? top_k : n;
        float reached = mass_floor(kept, weight, n, most, exp_(floor - top), (double)top_p);
        floor = reached > floor ? reached : floor;
    }
    return floor;
}

/* Returns the index of the largest x + noise among x >= floor, and stores that sum. x[0] is the token with id
 * `first`. */
INLINE int64_t draw_row(const float *x, int64_t vocab, float top, float floor, uint64_t key, uint32_t first, float *sum) {
    float best = -INFINITY;
    int64_t token = first_of(x, vocab, top);
    for (int64_t from = 0; from < vocab; from += NOISE_TILE) {
        int64_t count = vocab - from < NOISE_TILE ? vocab - from : NOISE_TILE;
        /* The noise is at most -log(2^-33) < 23. So a tile of logits that cannot win needs no noise. */
        float local = highest(x + from, count);
        if (local < floor || local + 23.0f < best) continue;
        float noisy[NOISE_TILE];
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            float value = x[from + i] + gumbel(token_bits(key, first + (uint32_t)(from + i)));
            noisy[i] = x[from + i] >= floor ? value : -INFINITY;
        }
        local = highest(noisy, count);
        if (local > best) {
            best = local;
            token = from + first_of(noisy, count, local);
        }
    }
    *sum = best;
    return token;
}

/* Writes x = logits / temperature. Returns the largest x. */
INLINE float scale(const float *logits, int64_t vocab, float temperature, float *x) {
#pragma omp simd
    for (int64_t i = 0; i < vocab; i++) x[i] = logits[i] / temperature;
    return highest(x, vocab);
}

/* `scratch` holds 3 * vocab floats. */
static int64_t sample_row(const float *logits, int64_t vocab, float temperature, int64_t top_k, float top_p, float min_p,
                          uint64_t key, float *scratch) {
    if (!(temperature > 0)) return first_of(logits, vocab, highest(logits, vocab));
    float top = scale(logits, vocab, temperature, scratch), sum;
    float floor = floor_of(scratch, vocab, top, top_k, top_p, min_p, scratch + vocab);
    return draw_row(scratch, vocab, top, floor, key, 0, &sum);
}

/* Returns 0, or -1 if the working rows cannot be allocated. */
int FOR_CLASS(sample)(const float *logits, int64_t stride, int64_t rows, int64_t vocab, const float *temperature,
           const int32_t *top_k, const float *top_p, const float *min_p, const int64_t *seed, const int32_t *choice,
           const int64_t *position, int64_t *out) {
    int failed = 0;
#pragma omp parallel if (rows > 1) reduction(| : failed)
    {
        float *scratch = malloc(3 * (vocab + 1) * sizeof(float));
        failed = !scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; row++)
            if (scratch)
                out[row] = sample_row(logits + row * stride, vocab, temperature[row], top_k[row], top_p[row], min_p[row],
                                      row_key(seed[row], choice[row], position[row]), scratch);
        free(scratch);
    }
    return failed ? -1 : 0;
}

/* The floors of rows, without a draw; -inf for rows with temperature 0. */
int FOR_CLASS(filter_floors)(const float *logits, int64_t stride, int64_t rows, int64_t vocab, const float *temperature,
           const int32_t *top_k, const float *top_p, const float *min_p, float *floors) {
    float *scratch = malloc(3 * (vocab + 1) * sizeof(float));
    if (!scratch) return -1;
    for (int64_t row = 0; row < rows; row++) {
        floors[row] = -INFINITY;
        if (!(temperature[row] > 0)) continue;
        float top = scale(logits + row * stride, vocab, temperature[row], scratch);
        floors[row] = floor_of(scratch, vocab, top, top_k[row], top_p[row], min_p[row], scratch + vocab);
    }
    free(scratch);
    return 0;
}

/* The best token of each row in a part of the vocabulary, from token id `first` on: its index in the part, and its
 * logit / temperature + noise, or its logit in rows with temperature 0. */
int FOR_CLASS(draw_part)(const float *logits, int64_t stride, int64_t rows, int64_t vocab, const float *temperature,
           const float *floors, const int64_t *seed, const int32_t *choice, const int64_t *position, int64_t first,
           float *best, int64_t *out) {
    int failed = 0;
#pragma omp parallel if (rows > 1) reduction(| : failed)
    {
        float *scratch = malloc((vocab + 1) * sizeof(float));
        failed = !scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; row++) {
            if (!scratch) continue;
            const float *x = logits + row * stride;
            if (temperature[row] > 0) {
                float top = scale(x, vocab, temperature[row], scratch);
                uint64_t key = row_key(seed[row], choice[row], position[row]);
                out[row] = draw_row(scratch, vocab, top, floors[row], key, (uint32_t)first, best + row);
            } else {
                best[row] = highest(x, vocab);
                out[row] = first_of(x, vocab, best[row]);
            }
        }
        free(scratch);
    }
    return failed ? -1 : 0;
}

static void bits_row(uint64_t key, const int64_t *tokens, int64_t count, int64_t *out) {
    for (int64_t i = 0; i < count; i++) out[i] = token_bits(key, (uint32_t)tokens[i]);
}

/* The hashes of the noise, for a test that all forms give the same bits. */
void FOR_CLASS(noise_bits)(const int64_t *seed, const int32_t *choice, const int64_t *position, int64_t rows, const int64_t *tokens,
                int64_t count, int64_t *out) {
    for (int64_t row = 0; row < rows; row++)
        bits_row(row_key(seed[row], choice[row], position[row]), tokens, count, out + row * count);
}

/* Reads and writes only the logits of tokens that occur in the row's prompt or output. */
int FOR_CLASS(penalties)(float *logits, int64_t stride, int64_t rows, int64_t vocab, const int32_t *tokens, int64_t token_stride,
              const int32_t *prompt_lens, const int32_t *total_lens, const float *repetition, const float *presence,
              const float *frequency) {
    int failed = 0;
#pragma omp parallel if (rows > 1) reduction(| : failed)
    {
        uint32_t *seen = calloc(vocab, sizeof(uint32_t)); /* bit 0: occurs; plus 2 per time in the output */
        failed = !seen;
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < rows; row++) {
            if (!seen) continue;
            const int32_t *ids = tokens + row * token_stride;
            float *x = logits + row * stride;
            if (repetition[row] == 1 && presence[row] == 0 && frequency[row] == 0) continue;
            for (int64_t i = 0; i < total_lens[row]; i++)
                if (ids[i] >= 0 && ids[i] < vocab) seen[ids[i]] = (seen[ids[i]] | 1) + (i >= prompt_lens[row] ? 2 : 0);
            for (int64_t i = 0; i < total_lens[row]; i++) {
                if (ids[i] < 0 || ids[i] >= vocab || !seen[ids[i]]) continue;
                float y = x[ids[i]];
                uint32_t times = seen[ids[i]] >> 1;
                y = y > 0 ? y / repetition[row] : y * repetition[row];
                y = y - frequency[row] * (float)times;
                x[ids[i]] = times ? y - presence[row] : y;
                seen[ids[i]] = 0;
            }
        }
        free(seen);
    }
    return failed ? -1 : 0;
}

static void logprobs_row(const float *x, int64_t vocab, int64_t token, int64_t k, float *chosen, int64_t *rank,
                                int64_t *ids, float *values) {
    float top = highest(x, vocab);
    double sum = 0;
    int64_t at_least = 0;
    float own = x[token];
    for (int64_t from = 0; from < vocab; from += 4096) {
        int64_t to = from + 4096 < vocab ? from + 4096 : vocab;
        float part = 0;
        int32_t count = 0;
#pragma omp simd reduction(+ : part, count)
        for (int64_t i = from; i < to; i++) {
            part += exp_(x[i] - top);
            count += x[i] >= own;
        }
        sum += part;
        at_least += count;
    }
    float normaliser = top + (float)log(sum);
    *chosen = own - normaliser;
    *rank = at_least;
    if (k == 0) return;
    uint32_t floor = ordered(kth_largest(x, vocab, k));
    int64_t above = 0, filled = 0;
    for (int64_t i = 0; i < vocab; i++) above += ordered(x[i]) > floor;
    int64_t equal = k - above; /* how many of the values equal to the k-th are kept: the first ones */
    for (int64_t i = 0; i < vocab && filled < k; i++) {
        if (ordered(x[i]) < floor || (ordered(x[i]) == floor && equal-- <= 0)) continue;
        int64_t j = filled++;
        for (; j > 0 && values[j - 1] < x[i]; j--) values[j] = values[j - 1], ids[j] = ids[j - 1];
        values[j] = x[i];
        ids[j] = i;
    }
    for (int64_t j = 0; j < filled; j++) values[j] -= normaliser;
}

void FOR_CLASS(logprobs)(const float *logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t *tokens, int64_t k,
              float *chosen, int64_t *rank, int64_t *ids, float *values) {
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        logprobs_row(logits + row * stride, vocab, tokens[row], k, chosen + row, rank + row, ids + row * k,
                     values + row * k);
}

/* bfloat16 logits as floats (kernels/sampling/greedy.py). */
void FOR_CLASS(widen_logits)(const uint16_t *logits, int64_t stride, int64_t rows, int64_t vocab, float *out) {
    for (int64_t row = 0; row < rows; row++, logits += stride, out += vocab) {
#pragma omp simd
        for (int64_t i = 0; i < vocab; i++) out[i] = from_bits((uint32_t)logits[i] << 16);
    }
}

void FOR_CLASS(token_mask)(float *logits, int64_t stride, int64_t vocab, const int64_t *rows, int64_t count, const uint32_t *mask,
                int64_t words) {
#pragma omp parallel for schedule(static, 1) if (count > 1)
    for (int64_t i = 0; i < count; i++) {
        float *x = logits + rows[i] * stride;
        for (int64_t word = 0; word < words; word++) {
            uint32_t bits = mask[i * words + word];
            int64_t first = word * 32, last = first + 32 < vocab ? first + 32 : vocab;
            if (bits == 0xFFFFFFFFu) continue;
            for (int64_t t = first; t < last; t++) x[t] = bits >> (t - first) & 1 ? x[t] : -INFINITY;
        }
    }
}
