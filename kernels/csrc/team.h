/* The threads of a call, and how they share the items of its operations.
 *
 * All threads of a team run the same function. An operation is a call of share_items: each thread takes the next items
 * until none is left, and returns when all items are done. A thread that has lost its core between two items holds up
 * nobody: the others take its share, and it passes over the operations that they have finished. So a team may run many
 * operations in a row, whole layers, in one parallel region of OpenMP.
 *
 * A thread may thus be operations behind the others. What it does between operations may depend only on what stays the
 * same during the call: it must neither read nor write what an operation writes. */
#pragma once
#include <stdint.h>

typedef void Work(const void *context);
/* Computes items [from, to). */
typedef void Items(const void *context, int64_t from, int64_t to);

/* Runs `work` in all threads of a team. In a team already: in this thread, as the others call it too. Returns 0, or -1
 * if there was no memory for an item. */
int run_team(Work *work, const void *context);

/* The same, but a small call stays on this thread: waking the others would cost more than the work. */
int run_team_if(int is_large, Work *work, const void *context);

/* Computes `count` items, at most `most` consecutive ones at once. Outside a team: in this thread. */
void share_items(int64_t count, int64_t most, Items *items, const void *context);

/* How many parts an operation over so many elements is cut into: one for each 2,048, and at most 16. */
static inline int64_t parts_of(int64_t elements) {
    const int64_t parts = elements / 2048;
    return parts < 1 ? 1 : parts > 16 ? 16 : parts;
}

/* Makes the team's memory at least `size` bytes large. Only the item of an operation of one item may call this. */
void resize_team_memory(int64_t size);
/* That memory, for items alone: a thread between operations may be behind the next resize. Null if there was none. */
void *team_memory(void);
