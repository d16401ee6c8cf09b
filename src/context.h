/*
 * A context, its threads, and the thread-local error text.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CONTEXT_H
#define CSA_CONTEXT_H

#include "stages.h"

struct csa_context {
    csa_backend backend; /* never CSA_BACKEND_DEFAULT */
    const char *tier;    /* of cpu and cuda, else "none" */
    const csa_stages *stages;
    int32_t threads;
    csa_parallel_for parallel_for;
    void *pool;
    bool check;
    size_t scratch_limit;
    struct csa_scratch *scratch;        /* NULL: none */
    const struct csa_cuda_module *cuda; /* NULL: a host back end */
    int32_t device;                     /* of cuda */
    int32_t multiprocessors;
    bool portable;        /* cuda: only what every supported architecture has */
    int32_t most_cluster; /* cuda: blocks of a cluster, 0 where there are none */
};

/* Memory of a context that one call at a time may use, to cut work finer; a call that does not get it does the
 * same work in larger pieces. */
void *csa_take_scratch(const csa_context *context);
void csa_return_scratch(const csa_context *context);

enum { CSA_MAX_THREADS = 4096 };
#define CSA_DEFAULT_SCRATCH ((size_t)128 << 20)

/* Checks options and fills in defaults, except the number of threads; call names the caller. */
csa_status csa_take_options(const csa_context_options *from, const char *call, csa_context_options *to);

/* Sets the calling thread's error text and returns status. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
csa_status
csa_fail(csa_status status, const char *format, ...);

/* One element of a loop. */
typedef void (*csa_body)(void *data, int64_t index);

/* Runs body(data, i) for each i in [0, count) on the context's threads, a few at a time, in any order. Fails
 * only if the caller's parallel_for left tasks out. */
csa_status csa_parallel(const csa_context *context, int64_t count, csa_body body, void *data);

/* The same for elements that take about `cost` nanoseconds each, few of which are not worth waking a thread
 * for: a task gets CSA_TASK_COST at least. */
csa_status csa_parallel_small(const csa_context *context, int64_t count, int64_t cost, csa_body body,
                              void *data);

/* A team that spins answers within 2 us and pays from 4 to 10 us of work on; one that sleeps takes 10 to 100.
 */
enum { CSA_TASK_COST = 3000 };

#endif
