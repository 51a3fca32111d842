/* A causal depthwise convolution over the tokens of each sequence, for a block of channels. Tokens are computed one
 * after the other, so the bits do not depend on how prefill is chunked. */
#pragma once
#include "recurrent.h"
#include "simd/activation.h"

#define CHANNELS 64 /* channels of a block */
#define MAX_TAPS 8

static inline int64_t channel_blocks(const Convolution *c) { return (c->channels + CHANNELS - 1) / CHANNELS; }

/* The last `count` inputs of a block of channels, the oldest first. */
typedef struct {
    float inputs[MAX_TAPS][CHANNELS];
    int64_t count;
} Window;

INLINE void *window_row(const Convolution *c, int64_t slot, int64_t row, int64_t first) {
    return at(c->window, (slot * (c->taps_count - 1) + row) * c->channels + first, (int)c->type);
}

/* Reads the window of `slot`, channels [first, first + channels); zeros for a new sequence. */
INLINE void load_window(const Convolution *c, Window *window, int64_t slot, int is_new, int64_t first,
                        int64_t channels, int type) {
    window->count = c->taps_count - 1;
    for (int64_t row = 0; row < window->count; row++)
        for (int64_t i = 0; i < channels; i += LANES)
            store_floats(window->inputs[row] + i,
                         is_new ? (Floats){0} : load_vector(window_row(c, slot, row, first), i, type));
}

INLINE void store_window(const Convolution *c, const Window *window, int64_t slot, int64_t first, int64_t channels,
                         int type) {
    for (int64_t row = 0; row < window->count; row++)
        for (int64_t i = 0; i < channels; i += LANES)
            store_vector(window_row(c, slot, row, first), i, load_floats(window->inputs[row] + i), type);
}

/* The convolution at a token with input `x`, for the LANES channels from first + i on. Shifts `x` into the window. */
INLINE Floats convolve(const Convolution *c, Window *window, Floats x, int64_t first, int64_t i) {
    Floats sum = c->bias ? load_floats(c->bias + first + i) : (Floats){0};
    const float *taps = c->taps + first + i;
    for (int64_t row = 0; row < window->count; row++) {
        const Floats input = load_floats(window->inputs[row] + i);
        sum += load_floats(taps + row * c->channels) * input;
        if (row) store_floats(window->inputs[row - 1] + i, input);
    }
    if (window->count) store_floats(window->inputs[window->count - 1] + i, x);
    return sum + load_floats(taps + window->count * c->channels) * x;
}
