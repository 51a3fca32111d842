/* A depthwise convolution over the tokens of each sequence, for a block of channels. Tokens pass in order, so chunks
 * change no bit. */
#pragma once
#include "recurrent.h"
#include "simd/activation.h"

#define CHANNELS 64 /* of an item */
#define MAX_TAPS 8

static inline int64_t channel_blocks(const Convolution *c) { return (c->channels + CHANNELS - 1) / CHANNELS; }

/* The inputs before the token that comes next, oldest first. */
typedef struct {
    float inputs[MAX_TAPS][CHANNELS];
    int64_t count;
} Past;

INLINE void *window_row(const Convolution *c, int64_t slot, int64_t row, int64_t first) {
    return at(c->window, (slot * (c->taps_count - 1) + row) * c->channels + first, (int)c->type);
}

/* Reads the window of `slot`; a new sequence has zeros. */
INLINE void load_past(const Convolution *c, Past *past, int64_t slot, int is_new, int64_t first, int64_t channels,
                      int type) {
    past->count = c->taps_count - 1;
    for (int64_t row = 0; row < past->count; row++)
        for (int64_t i = 0; i < channels; i += LANES)
            store_floats(past->inputs[row] + i,
                         is_new ? (Floats){0} : load_vector(window_row(c, slot, row, first), i, type));
}

INLINE void store_past(const Convolution *c, const Past *past, int64_t slot, int64_t first, int64_t channels, int type) {
    for (int64_t row = 0; row < past->count; row++)
        for (int64_t i = 0; i < channels; i += LANES)
            store_vector(window_row(c, slot, row, first), i, load_floats(past->inputs[row] + i), type);
}

/* The convolution at a token whose input is `x`, for the LANES channels from first + i on. Keeps `x`. */
INLINE Floats convolve(const Convolution *c, Past *past, Floats x, int64_t first, int64_t i) {
    Floats sum = c->bias ? load_floats(c->bias + first + i) : (Floats){0};
    const float *taps = c->taps + first + i;
    for (int64_t row = 0; row < past->count; row++) {
        const Floats input = load_floats(past->inputs[row] + i);
        sum += load_floats(taps + row * c->channels) * input;
        if (row) store_floats(past->inputs[row - 1] + i, input);
    }
    if (past->count) store_floats(past->inputs[past->count - 1] + i, x);
    return sum + load_floats(taps + past->count * c->channels) * x;
}
