/* A gated short convolution between its projections (formulas and shapes: kernels/linear_attention/short_conv.py). An
 * item is a block of channels of one sequence. */
#include "convolution.h"
#include "simd/cpu_class.h"
#include "team.h"

#define PARALLEL_FROM 65536 /* a call with this many inputs (channels times tokens) uses several threads */

INLINE void compute_block(const ShortConv *s, int64_t sequence, int64_t first, int type) {
    const Convolution *c = &s->conv;
    const int64_t start = c->cu_seqlens[sequence], stop = c->cu_seqlens[sequence + 1];
    const int64_t length = c->seq_lens[sequence], channels = min_i64(CHANNELS, c->channels - first);
    if (!length || start == stop) { /* padding, or no token in this step */
        for (int64_t t = start; t < stop; t++)
            for (int64_t i = 0; i < channels; i += LANES)
                store_vector(at(s->out, t * c->channels + first, type), i, (Floats){0}, type);
        return;
    }
    Window window;
    load_window(c, &window, c->slots[sequence], length == stop - start, first, channels, type);
    for (int64_t t = start; t < stop; t++) {
        const void *row = at(s->rows, t * s->stride + first, type);
        const void *c_row = at(row, c->channels, type), *x_row = at(row, 2 * c->channels, type);
        void *out = at(s->out, t * c->channels + first, type);
        for (int64_t i = 0; i < channels; i += LANES) {
            const Floats input = rounded_vector(load_vector(row, i, type) * load_vector(x_row, i, type), type);
            const Floats sum = rounded_vector(convolve(c, &window, input, first, i), type);
            store_vector(out, i, load_vector(c_row, i, type) * sum, type);
        }
    }
    store_window(c, &window, c->slots[sequence], first, channels, type);
}

static void compute_blocks(const void *context, int64_t from, int64_t to) {
    const ShortConv *s = context;
    const int64_t blocks = channel_blocks(&s->conv);
    for (int64_t item = from; item < to; item++) {
        if (s->conv.type == BF16) compute_block(s, item / blocks, item % blocks * CHANNELS, BF16);
        else compute_block(s, item / blocks, item % blocks * CHANNELS, F32);
    }
}

static void compute_all(const void *context) {
    const ShortConv *s = context;
    share_items(s->conv.sequences * channel_blocks(&s->conv), 4, compute_blocks, s);
}

void FOR_CLASS(short_conv)(const ShortConv *s) {
    run_team_if(s->conv.tokens * s->conv.channels >= PARALLEL_FROM, compute_all, s);
}
