/* The input of a step from the batch state. Formula and shapes: kernels/kv/gather_rows.py. */
#include <stdint.h>
#include <string.h>

typedef struct {
    const int64_t *spans; /* slot, first position and number of tokens of each row */
    int64_t rows;
    const int32_t *token_ids;
    int64_t token_stride;
    const int32_t *block_tables;
    int64_t table_stride, block_size, blocks; /* `blocks`: the width of `tables` */
    int64_t *input_ids, *positions, *slot_mapping;
    int32_t *tables, *seq_lens, *cu_seqlens;
} StepRows;

void gather_rows(const StepRows *s) {
    int64_t token = 0;
    s->cu_seqlens[0] = 0;
    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t slot = s->spans[3 * r], start = s->spans[3 * r + 1], end = start + s->spans[3 * r + 2];
        const int32_t *ids = s->token_ids + slot * s->token_stride, *table = s->block_tables + slot * s->table_stride;
        for (int64_t position = start; position < end; position++, token++) {
            s->input_ids[token] = ids[position], s->positions[token] = position;
            s->slot_mapping[token] = table[position / s->block_size] * s->block_size + position % s->block_size;
        }
        memcpy(s->tables + r * s->blocks, table, (size_t)s->blocks * sizeof *table);
        s->seq_lens[r] = (int32_t)end, s->cu_seqlens[r + 1] = (int32_t)token;
    }
}
