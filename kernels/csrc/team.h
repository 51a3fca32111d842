/* The threads of a call, and how they share the items of its operations.
 *
 * All threads of a team run the same function. An operation is a call of share_items: each thread takes the next items
 * until none is left, and returns when all items are done. If a thread loses its core between two items, the others
 * take its share, and do not wait for it. Later it skips the operations that they have finished. So a team can run many
 * consecutive operations, even whole layers, in one parallel region of OpenMP.
 *
 * A thread may thus be operations behind the others. Between operations a thread must neither read nor write what an
 * operation writes, and every thread must call the same operations with the same counts. Items must not call
 * share_items or run_team. Each thread of Python that calls a kernel has a team of its own. */
#pragma once
#include <stdint.h>

typedef void Work(const void *context);
/* Computes items [from, to). */
typedef void Items(const void *context, int64_t from, int64_t to);

/* Runs `work` in all threads of a new team. A thread of a team runs `work` itself: the others make the same call. Returns
 * 0, or -1 if resize_team_memory found no memory; in a team always 0, because the outermost call returns the -1. */
int run_team(Work *work, const void *context);

/* As run_team, but if `is_large` is 0 and there is no team, only this thread runs: waking others would take longer. */
int run_team_if(int is_large, Work *work, const void *context);

/* Computes `count` items. A thread takes at most `most` consecutive items at once. Without a team this thread computes
 * all. */
void share_items(int64_t count, int64_t most, Items *items, const void *context);

/* The number of parts of an operation over so many elements: one for each 2,048, at most 16. */
static inline int64_t parts_of(int64_t elements) {
    const int64_t parts = elements / 2048;
    return parts < 1 ? 1 : parts > 16 ? 16 : parts;
}

/* Makes the team's memory at least `size` bytes large. Its contents are lost. Only the item of an operation with a
 * single item may call this. */
void resize_team_memory(int64_t size);
/* The team's memory; null if it could not be allocated. Only items may call this: between operations a thread may be
 * behind, and another one may resize the memory. */
void *team_memory(void);
