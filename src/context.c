/*
 * Contexts, threads, error text, versions.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "args.h"
#include "cpu/tiers.h"
#include "cuda/module.h"

#include <omp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

/* ---- Error text and version --------------------------------------------------------------------- */

static _Thread_local char last_error[512];

csa_status csa_fail(csa_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

static size_t copy_text(const char *from, char *text, size_t capacity)
{
    size_t length = strlen(from);
    if (text && capacity > 0) {
        size_t copied = length < capacity ? length : capacity - 1;
        memcpy(text, from, copied);
        text[copied] = 0;
    }
    return length;
}

size_t csa_last_error(char *text, size_t capacity)
{
    return copy_text(last_error, text, capacity);
}

const char *csa_status_name(csa_status status)
{
    static const char *const names[] = {"ok",     "argument", "unsupported", "workspace",
                                        "bad id", "memory",   "device",      "internal"};
    return (unsigned)status < sizeof names / sizeof *names ? names[status] : "unknown status";
}

int csa_version(void)
{
    return CSA_VERSION;
}

#define TEXT_OF(x) #x
#define TEXT(x)    TEXT_OF(x)

const char *csa_version_string(void)
{
    return TEXT(CSA_VERSION_MAJOR) "." TEXT(CSA_VERSION_MINOR) "." TEXT(CSA_VERSION_PATCH);
}

/* ---- Back ends ---------------------------------------------------------------------------------- */

static const char *const backend_names[] = {
    [CSA_BACKEND_DEFAULT] = "default",
    [CSA_BACKEND_REF] = "ref",
    [CSA_BACKEND_CPU] = "cpu",
    [CSA_BACKEND_CUDA] = "cuda",
};

static bool known_backend(csa_backend number)
{
    return (unsigned)number < sizeof backend_names / sizeof *backend_names;
}

const char *csa_backend_name(csa_backend number)
{
    return known_backend(number) ? backend_names[number] : "unknown back end";
}

/* Writes the line about the GPUs, or why there is no back end for them. */
static csa_status describe_cuda(char *text, size_t capacity)
{
    const char *why;
    const csa_cuda_module *cuda = csa_open_cuda(&why);
    if (cuda)
        return cuda->describe(text, capacity);
    snprintf(text, capacity, "%s", why);
    return CSA_ERROR_UNSUPPORTED;
}

csa_status csa_backend_describe(csa_backend number, char *text, size_t capacity)
{
    char line[256];
    csa_status status = CSA_OK;
    switch (number) {
    case CSA_BACKEND_DEFAULT:
        snprintf(line, sizeof line, "the fastest host back end: cpu");
        break;
    case CSA_BACKEND_REF:
        snprintf(line, sizeof line, "scalar C on all threads, the executable specification");
        break;
    case CSA_BACKEND_CPU:
        snprintf(line, sizeof line, "vectorised, tier %s of %s", csa_find_cpu_tier(NULL)->name,
                 csa_cpu_tier_names());
        break;
    case CSA_BACKEND_CUDA:
        status = describe_cuda(line, sizeof line);
        break;
    default:
        snprintf(line, sizeof line, "there is no back end %d", (int)number);
        status = CSA_ERROR_ARGUMENT;
    }
    copy_text(line, text, capacity);
    return status == CSA_OK ? CSA_OK : csa_fail(status, "csa_backend_describe: %s", line);
}

csa_status csa_device_describe(csa_backend number, int32_t device, char *text, size_t capacity)
{
    char line[256], why[200] = "it runs on the host";
    const char *missing;
    const csa_cuda_module *cuda = number == CSA_BACKEND_CUDA ? csa_open_cuda(&missing) : NULL;
    csa_status status = cuda ? cuda->describe_device(device, line, sizeof line) : CSA_ERROR_ARGUMENT;
    if (number == CSA_BACKEND_CUDA)
        describe_cuda(why, sizeof why);
    if (status == CSA_ERROR_ARGUMENT)
        snprintf(line, sizeof line, "%s has no device %d: %s", csa_backend_name(number), (int)device, why);
    copy_text(line, text, capacity);
    return status == CSA_OK ? CSA_OK : csa_fail(status, "csa_device_describe: %s", line);
}

/* ---- Threads ------------------------------------------------------------------------------------ */

/* The team always has the context's size: the runtime keeps a team for the next call, but allocates another one
 * when the size changes. */
static void openmp_for(void *pool, int32_t count, csa_task task, void *task_data)
{
    const csa_context *context = pool;
#pragma omp parallel for num_threads(context->threads) schedule(static, 1)
    for (int32_t i = 0; i < count; i++)
        task(task_data, i);
}

typedef struct loop {
    int64_t count, chunk;
    csa_body body;
    void *data;
    atomic_llong next;
    atomic_int finished;
} loop;

/* Takes chunks of the loop until none is left. */
static void run_chunks(void *task_data, int32_t task)
{
    loop *l = task_data;
    (void)task;
    for (;;) {
        int64_t first = atomic_fetch_add_explicit(&l->next, l->chunk, memory_order_relaxed);
        int64_t end = first + l->chunk < l->count ? first + l->chunk : l->count;
        if (first >= l->count)
            break;
        for (int64_t i = first; i < end; i++)
            l->body(l->data, i);
    }
    atomic_fetch_add_explicit(&l->finished, 1, memory_order_relaxed);
}

static csa_status run_tasks(const csa_context *context, int32_t tasks, int64_t count, csa_body body, void *data)
{
    loop l = {.count = count, .chunk = count / (8 * (int64_t)tasks) + 1, .body = body, .data = data};
    if (tasks == 1)
        run_chunks(&l, 0);
    else
        context->parallel_for(context->pool, tasks, run_chunks, &l);
    int finished = atomic_load(&l.finished);
    if (finished != tasks)
        return csa_fail(CSA_ERROR_INTERNAL, "parallel_for ran %d tasks of %d", finished, (int)tasks);
    return CSA_OK;
}

csa_status csa_parallel_small(const csa_context *context, int64_t count, int64_t cost, csa_body body,
                              void *data)
{
    if (count <= 0)
        return CSA_OK;
    int64_t per_task = (CSA_TASK_COST + cost - 1) / cost, tasks = count / per_task;
    tasks = tasks < 1 ? 1 : tasks < context->threads ? tasks : context->threads;
    return run_tasks(context, (int32_t)tasks, count, body, data);
}

csa_status csa_parallel(const csa_context *context, int64_t count, csa_body body, void *data)
{
    return csa_parallel_small(context, count, CSA_TASK_COST, body, data);
}

/* ---- Contexts ----------------------------------------------------------------------------------- */

static void check_tier(csa_checker *c, const csa_context_options *o)
{
    if (!o->tier)
        return;
    if (o->backend == CSA_BACKEND_REF)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "tier is %.32s, but ref has no tiers", o->tier);
    if (o->backend == CSA_BACKEND_CPU && !csa_find_cpu_tier(o->tier))
        csa_refuse(c, CSA_ERROR_UNSUPPORTED,
                   "back end cpu: tier %.32s is unknown or does not run here, tiers: %s", o->tier,
                   csa_cpu_tier_names());
}

csa_status csa_take_options(const csa_context_options *from, const char *call, csa_context_options *to)
{
    csa_context_options defaults = {.size = sizeof defaults};
    csa_checker c = {.call = call};
    csa_take(&c, to, from ? from : &defaults, sizeof *to, "csa_context_options");
    if (to->threads < 0 || to->threads > CSA_MAX_THREADS)
        csa_refuse(&c, CSA_ERROR_ARGUMENT, "threads is %d, expected 0 to %d", (int)to->threads,
                   CSA_MAX_THREADS);
    if (to->parallel_for && to->threads == 0)
        csa_refuse(&c, CSA_ERROR_ARGUMENT,
                   "threads is 0, but parallel_for is given: say how many tasks it may get");
    if (!known_backend(to->backend))
        csa_refuse(&c, CSA_ERROR_ARGUMENT, "there is no back end %d", (int)to->backend);
    if (to->backend == CSA_BACKEND_DEFAULT)
        to->backend = CSA_BACKEND_CPU;
    check_tier(&c, to);
    if (to->scratch_limit == 0)
        to->scratch_limit = CSA_DEFAULT_SCRATCH;
    return c.status;
}

/* A context's scratch, and whether a call is using it. */
typedef struct csa_scratch {
    atomic_flag busy;
    void *memory;
} csa_scratch;

void *csa_take_scratch(const csa_context *context)
{
    csa_scratch *s = context->scratch;
    return s && !atomic_flag_test_and_set_explicit(&s->busy, memory_order_acquire) ? s->memory : NULL;
}

void csa_return_scratch(const csa_context *context)
{
    atomic_flag_clear_explicit(&context->scratch->busy, memory_order_release);
}

/* Whole huge pages, if the system has them to give. */
static void *huge_pages(size_t bytes)
{
    const size_t page = (size_t)2 << 20;
    bytes = (bytes + page - 1) / page * page;
    void *memory = aligned_alloc(page, bytes);
#ifdef MADV_HUGEPAGE
    if (memory)
        (void)madvise(memory, bytes, MADV_HUGEPAGE); /* advice: small pages do the same */
#endif
    return memory;
}

static csa_scratch *make_scratch(size_t bytes)
{
    csa_scratch *made = calloc(1, sizeof *made);
    if (made && !(made->memory = huge_pages(bytes))) {
        free(made);
        return NULL;
    }
    return made;
}

/* Lets the module fill in the context, if there is one. */
static csa_status open_cuda(csa_context *context, const csa_context_options *o)
{
    const char *why;
    context->cuda = csa_open_cuda(&why);
    if (!context->cuda)
        return csa_fail(CSA_ERROR_UNSUPPORTED, "csa_context_create: back end cuda: %s", why);
    return context->cuda->open(context, o->device, o->tier);
}

static void log_context(const csa_context_options *o, const csa_context *context)
{
    char line[160];
    if (!o->log)
        return;
    snprintf(line, sizeof line, "csa %s: back end %s, tier %s, %d threads", csa_version_string(),
             csa_backend_name(context->backend), context->tier, (int)context->threads);
    o->log(o->log_user, line);
}

csa_status csa_context_create(const csa_context_options *options, csa_context **context)
{
    if (!context)
        return csa_fail(CSA_ERROR_ARGUMENT, "csa_context_create: context is NULL");
    *context = NULL;
    csa_context_options o;
    csa_status status = csa_take_options(options, "csa_context_create", &o);
    if (status != CSA_OK)
        return status;
    const csa_cpu_tier *tier = o.backend == CSA_BACKEND_CPU ? csa_find_cpu_tier(o.tier) : NULL;
    csa_context *made = malloc(sizeof *made);
    if (!made)
        return csa_fail(CSA_ERROR_MEMORY, "csa_context_create: out of memory");
    *made = (csa_context){
        .backend = o.backend,
        .tier = tier ? tier->name : "none",
        .stages = tier ? tier->stages : &csa_ref_stages,
        .threads = o.threads ? o.threads : omp_get_max_threads(),
        .parallel_for = o.parallel_for ? o.parallel_for : openmp_for,
        .pool = o.parallel_for ? o.pool : made,
        .check = o.check,
        .scratch_limit = o.scratch_limit,
    };
    if (tier && made->threads > 1) {
        made->scratch = make_scratch(csa_cpu_scratch_bytes() * (size_t)made->threads);
        if (!made->scratch) {
            free(made);
            return csa_fail(CSA_ERROR_MEMORY, "csa_context_create: out of memory");
        }
    }
    if (o.backend == CSA_BACKEND_CUDA && (status = open_cuda(made, &o)) != CSA_OK) {
        free(made);
        return status;
    }
    log_context(&o, made);
    *context = made;
    return CSA_OK;
}

void csa_context_destroy(csa_context *context)
{
    if (context && context->scratch) {
        free(context->scratch->memory);
        free(context->scratch);
    }
    free(context);
}

const char *csa_context_tier(const csa_context *context)
{
    return context ? context->tier : "none";
}

csa_backend csa_context_backend(const csa_context *context)
{
    return context ? context->backend : CSA_BACKEND_DEFAULT;
}

int32_t csa_context_threads(const csa_context *context)
{
    return context ? context->threads : 0;
}
