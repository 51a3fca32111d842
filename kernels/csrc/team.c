#include "team.h"

#include <omp.h>
#include <stdatomic.h>
#include <stdlib.h>
#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define LINE 64
#define SPINS 2000 /* a waiting thread spins this often, about 50 us; then it sleeps, to free its core */

typedef struct {
    _Alignas(LINE) _Atomic uint64_t state; /* upper half: number of the operation; lower half: its next item */
    _Alignas(LINE) _Atomic int64_t done;   /* how many items of the operation are done */
    _Alignas(LINE) _Atomic int sleepers;
    void *memory;
    int64_t memory_size;
    int has_failed;
} Team;

/* The team of this thread, how many threads it has, and the number of the operation that this thread has reached. */
static __thread struct {
    Team *team;
    int64_t size;
    uint32_t operation;
} member;

static inline void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline uint32_t operation_of(uint64_t state) { return (uint32_t)(state >> 32); }

#ifdef __linux__
/* The half of the state that holds the number of the operation. */
static void *futex_of(Team *t) { return (uint32_t *)&t->state + (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__); }

static void sleep_until_done(Team *t, uint32_t operation) {
    atomic_fetch_add(&t->sleepers, 1);
    while (operation_of(atomic_load(&t->state)) == operation)
        syscall(SYS_futex, futex_of(t), FUTEX_WAIT_PRIVATE, operation, NULL, NULL, 0);
    atomic_fetch_sub(&t->sleepers, 1);
}

static void wake_sleepers(Team *t) {
    if (atomic_load(&t->sleepers)) syscall(SYS_futex, futex_of(t), FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
#else
static void sleep_until_done(Team *t, uint32_t operation) {
    while (operation_of(atomic_load(&t->state)) == operation) sched_yield();
}
static void wake_sleepers(Team *t) { (void)t; }
#endif

static void wait_until_done(Team *t, uint32_t operation) {
    for (int i = 0; i < SPINS; i++) {
        if (operation_of(atomic_load_explicit(&t->state, memory_order_acquire)) != operation) return;
        pause_core();
    }
    sleep_until_done(t, operation);
}

void share_items(int64_t count, int64_t most, Items *items, const void *context) {
    Team *t = member.team;
    if (count <= 0) return;
    if (!t || member.size == 1) {
        items(context, 0, count);
        return;
    }
    const uint32_t operation = member.operation++;
    uint64_t state = atomic_load_explicit(&t->state, memory_order_acquire);
    while (operation_of(state) == operation) {
        const int64_t from = (uint32_t)state;
        if (from == count) {
            wait_until_done(t, operation);
            return;
        }
        /* Take fewer items towards the end, so that all threads end together. */
        const int64_t fair = (count - from) / (2 * member.size), taken = fair < 1 ? 1 : fair < most ? fair : most;
        if (!atomic_compare_exchange_weak_explicit(&t->state, &state, state + (uint64_t)taken, memory_order_acquire,
                                                   memory_order_acquire))
            continue;
        items(context, from, from + taken);
        if (atomic_fetch_add(&t->done, taken) + taken == count) {
            atomic_store_explicit(&t->done, 0, memory_order_relaxed);
            atomic_store(&t->state, (uint64_t)(operation + 1) << 32);
            wake_sleepers(t);
            return;
        }
        state = atomic_load_explicit(&t->state, memory_order_acquire);
    }
}

void resize_team_memory(int64_t size) {
    Team *t = member.team;
    if (size <= t->memory_size) return;
    free(t->memory);
    t->memory = malloc(size), t->memory_size = t->memory ? size : 0;
    if (!t->memory) t->has_failed = 1;
}

void *team_memory(void) { return member.team->memory; }

int run_team(Work *work, const void *context) {
    if (member.team) {
        work(context);
        return 0;
    }
    Team team = {.state = 0};
#pragma omp parallel if (!omp_in_parallel())
    {
        member.team = &team, member.size = omp_get_num_threads(), member.operation = 0;
        work(context);
        member.team = NULL;
    }
    free(team.memory);
    return team.has_failed ? -1 : 0;
}

int run_team_if(int is_large, Work *work, const void *context) {
    if (is_large) return run_team(work, context);
    work(context);
    return 0;
}
