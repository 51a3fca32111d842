/* Collectives between processes of one host through memory that they all map.
 *
 * Each rank has one cache line of counters and two buffers. Calls are numbered from 1, in the same way on every rank.
 * In call n a rank writes its part to buffer n % 2 and sets `posted` to n. When it has read the others' parts, it sets
 * `done` to n. It writes the buffer again two calls later, after every rank has set `done`. Sums add the ranks in
 * order, in float32, and are rounded once, so that every rank has the same bits.
 *
 * A wait first spins briefly, because ranks usually arrive together. Then it sleeps on a futex, so that an idle group
 * uses no CPU. */
#include <errno.h>
#include <signal.h>
#include <time.h>

#include "simd/cpu_class.h"
#include "simd/scalar.h"
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MAX_RANKS 64
#define SPIN_NS 100000
#define SLEEP_NS 100000000 /* how often a sleeping rank checks that the process it waits for is alive */

typedef struct {
    uint32_t posted, done, sleepers;
    uint32_t unused[13]; /* pads to a cache line, because another core writes each rank's counters */
} Counters;

typedef struct {
    Counters *counters; /* [size] */
    char *buffers;      /* [size][2][chunk] */
    int64_t rank, size, chunk, timeout_ns;
    int64_t pids[MAX_RANKS]; /* 0: not checked */
    uint32_t call;    /* the number of the last call that this rank has begun */
} Shared;

/* A call returns 0, LATE + rank (timed out) or GONE + rank (its process has ended). */
enum { LATE = 1, GONE = LATE + MAX_RANKS };

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Counters wrap around. That is safe, because they never differ by more than a few calls. */
static int reached(const uint32_t *counter, uint32_t call) {
    return (int32_t)(__atomic_load_n(counter, __ATOMIC_ACQUIRE) - call) >= 0;
}

static void sleep_on(Counters *counters, uint32_t *counter, uint32_t seen) {
    __atomic_add_fetch(&counters->sleepers, 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    const struct timespec slice = {0, SLEEP_NS};
    syscall(SYS_futex, counter, FUTEX_WAIT, seen, &slice, 0, 0);
#else
    const struct timespec slice = {0, 1000000};
    if (__atomic_load_n(counter, __ATOMIC_SEQ_CST) == seen) nanosleep(&slice, 0);
#endif
    __atomic_sub_fetch(&counters->sleepers, 1, __ATOMIC_SEQ_CST);
}

static void set(Counters *counters, uint32_t *counter, uint32_t call) {
    __atomic_store_n(counter, call, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(&counters->sleepers, __ATOMIC_SEQ_CST)) syscall(SYS_futex, counter, FUTEX_WAKE, 1 << 30, 0, 0, 0);
#endif
}

static int await(const Shared *s, int64_t rank, uint32_t *counter, uint32_t call) {
    if (reached(counter, call)) return 0;
    const int64_t begin = now_ns();
    for (int64_t tries = 1; !reached(counter, call); tries++) {
        relax();
        if (tries % 64) continue;
        int64_t waited = now_ns() - begin;
        if (waited < SPIN_NS) continue;
        if (waited > s->timeout_ns) return LATE + (int)rank;
        if (s->pids[rank] && kill((pid_t)s->pids[rank], 0) && errno == ESRCH)
            return reached(counter, call) ? 0 : GONE + (int)rank; /* it may have posted before it ended */
        uint32_t seen = __atomic_load_n(counter, __ATOMIC_SEQ_CST);
        if ((int32_t)(seen - call) < 0) sleep_on(s->counters + rank, counter, seen);
    }
    return 0;
}

static char *buffer(const Shared *s, int64_t rank, uint32_t call) {
    return s->buffers + (rank * 2 + call % 2) * s->chunk;
}

/* Begins the next call. On return this rank may write its buffer. */
static int begin(Shared *s) {
    int failed = 0;
    s->call++;
    for (int64_t r = 0; r < s->size && !failed; r++) failed = await(s, r, &s->counters[r].done, s->call - 2);
    return failed;
}

static void post(Shared *s) { set(s->counters + s->rank, &s->counters[s->rank].posted, s->call); }
static void finish(Shared *s) { set(s->counters + s->rank, &s->counters[s->rank].done, s->call); }

static int await_posts(Shared *s) {
    int failed = 0;
    for (int64_t r = 0; r < s->size && !failed; r++) failed = await(s, r, &s->counters[r].posted, s->call);
    return failed;
}

INLINE void add_up(const Shared *s, void *x, int64_t count, int type) {
    const void *parts[MAX_RANKS];
    for (int64_t r = 0; r < s->size; r++) parts[r] = buffer(s, r, s->call);
    if (s->size == 2) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) put(x, i, get(parts[0], i, type) + get(parts[1], i, type), type);
        return;
    }
    float total[256];
    for (int64_t from = 0; from < count; from += 256) {
        int64_t n = count - from < 256 ? count - from : 256;
        for (int64_t i = 0; i < n; i++) total[i] = get(parts[0], from + i, type);
        for (int64_t r = 1; r < s->size; r++) {
#pragma omp simd
            for (int64_t i = 0; i < n; i++) total[i] += get(parts[r], from + i, type);
        }
#pragma omp simd
        for (int64_t i = 0; i < n; i++) put(x, from + i, total[i], type);
    }
}

static void add_up_typed(const Shared *s, void *x, int64_t count, int64_t type) {
    if (type == BF16) add_up(s, x, count, BF16);
    else add_up(s, x, count, F32);
}

/* Replaces x on every rank by the sum of all ranks' x. */
int FOR_CLASS(shared_all_reduce)(Shared *s, void *x, int64_t count, int64_t type) {
    const int64_t width = type == BF16 ? 2 : 4, chunk_elements = s->chunk / width;
    int failed;
    for (int64_t from = 0; from < count; from += chunk_elements) {
        int64_t n = count - from < chunk_elements ? count - from : chunk_elements;
        if ((failed = begin(s))) return failed;
        memcpy(buffer(s, s->rank, s->call), at(x, from, (int)type), n * width);
        post(s);
        if ((failed = await_posts(s))) return failed;
        add_up_typed(s, at(x, from, (int)type), n, type);
        finish(s);
    }
    return 0;
}

/* Writes every rank's x to out [size][bytes]. */
int FOR_CLASS(shared_all_gather)(Shared *s, const void *x, int64_t bytes, void *out) {
    int failed;
    for (int64_t from = 0; from < bytes; from += s->chunk) {
        int64_t n = bytes - from < s->chunk ? bytes - from : s->chunk;
        if ((failed = begin(s))) return failed;
        memcpy(buffer(s, s->rank, s->call), (const char *)x + from, n);
        post(s);
        if ((failed = await_posts(s))) return failed;
        for (int64_t r = 0; r < s->size; r++) memcpy((char *)out + r * bytes + from, buffer(s, r, s->call), n);
        finish(s);
    }
    return 0;
}

/* Copies rank 0's x to every rank's x. All ranks pass the same `bytes`. Rank 0 does not wait for the others to read. */
int FOR_CLASS(shared_broadcast)(Shared *s, void *x, int64_t bytes) {
    int failed;
    for (int64_t from = 0; from < bytes; from += s->chunk) {
        int64_t n = bytes - from < s->chunk ? bytes - from : s->chunk;
        if ((failed = begin(s))) return failed;
        if (s->rank == 0) {
            memcpy(buffer(s, 0, s->call), (char *)x + from, n);
        } else {
            if ((failed = await(s, 0, &s->counters[0].posted, s->call))) return failed;
            memcpy((char *)x + from, buffer(s, 0, s->call), n);
        }
        post(s);
        finish(s);
    }
    return 0;
}
