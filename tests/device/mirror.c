/*
 * The mirror: lets programs whose tensors are host memory call a back end whose tensors are not. Loaded with
 * LD_PRELOAD, it stands in front of every computing call, copies what the call may touch to the device, calls
 * the library with pointers to the copies, and copies everything back, so that a test also sees what should not
 * have been written. It serves cuda contexts; with CSA_MIRROR=all any context, on guarded host memory, which
 * tests the mirror itself, and tests that back ends stay within their tensors.
 *
 * Which memory may be touched, only the library can say: a call it would refuse may carry any pointer. So the
 * call is made twice. The first time on a copy of the context whose back end does nothing: all checks, no ids
 * read. What that refuses goes to the library as it came. (This is why a program outside the library knows its
 * seam.) SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE /* RTLD_NEXT, mincore */
#include "device.h"
#include "plan.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Who a context's memory has to live with; NULL: nobody, the call is the library's alone. */
static const device *device_for(const csa_context *context)
{
    const char *which = getenv("CSA_MIRROR");
    if (!context)
        return NULL;
    if (context->backend == CSA_BACKEND_CUDA)
        return device_cuda();
    return which && strcmp(which, "all") == 0 ? device_guarded() : NULL;
}

/* The library's own function of that name; looked for each time, since calls are slow here anyway. */
static void find_next(const char *name, void *function)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (!found)
        device_fail("no %s behind the mirror: does the program link the shared library?", name);
    memcpy(function, &found, sizeof found);
}

/* ---- What a descriptor holds -------------------------------------------------------------------- */

typedef struct form form;

/* Offsets of what may point to device memory. */
struct form {
    size_t size;
    struct {
        size_t at;
        int count;  /* tensors, one after the other */
        bool whole; /* none of them is looked at if the first is absent */
    } tensors[2];
    size_t unread; /* tensors beside these */
    struct {
        size_t at;
        const form *form;
        size_t with; /* not looked at if this tensor is absent */
    } nested[3];
    size_t workspace, scratch; /* the latter needs no warming up */
    bool scales;
};

static const form tokens_form = {.size = sizeof(csa_tokens),
                                 .tensors = {{.at = offsetof(csa_tokens, block_table), .count = 7}}};
static const form rows_form = {.size = sizeof(csa_rows),
                               .tensors = {{.at = offsetof(csa_rows, active), .count = 5}}};
static const form cache_form = {
    .size = sizeof(csa_cache), .tensors = {{.at = offsetof(csa_cache, kv), .count = 3}}, .scales = true};
static const form prepare_form = {
    .size = sizeof(csa_prepare_args),
    .tensors = {{.at = offsetof(csa_prepare_args, index_query), .count = 10},
                {.at = offsetof(csa_prepare_args, query), .count = 9, .whole = true}},
    .nested = {{.at = offsetof(csa_prepare_args, tokens), .form = &tokens_form},
               {.at = offsetof(csa_prepare_args, cache), .form = &cache_form}}};

/* ---- One call's memory -------------------------------------------------------------------------- */

enum { MOST_PLACES = 64, MOST_COPIES = 8 };

/* A pointer in a copied descriptor, and the bytes that can be reached through it. */
typedef struct place {
    void *pointer;
    uint8_t *first, *end;
} place;

/* Overlapping bytes become one piece of device memory: outputs may be inputs, blocks may hold their summaries.
 * What only touches stays apart, nothing may rely on it. */
typedef struct span {
    uint8_t *host, *copy;
    size_t bytes;
} span;

typedef struct mirror {
    const device *device;
    place places[MOST_PLACES];
    span spans[MOST_PLACES];
    void *copies[MOST_COPIES]; /* of descriptors */
    int place_count, span_count, copy_count;
    csa_workspace *workspace; /* in a copy; NULL: the call uses none */
} mirror;

/* Sorted by where they begin. */
static void add_place(mirror *m, void *pointer, uint8_t *first, uint8_t *end)
{
    int i = m->place_count++;
    if (i == MOST_PLACES)
        device_fail("a call with more than %d tensors", MOST_PLACES);
    for (; i > 0 && (uintptr_t)m->places[i - 1].first > (uintptr_t)first; i--)
        m->places[i] = m->places[i - 1];
    m->places[i] = (place){pointer, first, end};
}

static void add_tensor(mirror *m, csa_tensor *t)
{
    int64_t item = (int64_t)(t->dtype >> 8 & 0xFF) / 8, before = 0, past = item;
    for (int i = 0; i < t->ndim; i++) {
        int64_t reach = t->shape[i] > 1 ? (t->shape[i] - 1) * t->stride[i] * item : 0;
        if (t->shape[i] == 0)
            return;
        *(reach < 0 ? &before : &past) += reach;
    }
    if (t->ndim > 0 && t->data)
        add_place(m, &t->data, (uint8_t *)t->data + before, (uint8_t *)t->data + past);
}

static void add_scale(mirror *m, const float **scale)
{
    if (*scale)
        add_place(m, scale, (uint8_t *)*scale, (uint8_t *)(*scale + 1));
}

/* As the library reads it: no more than it says, no more than is known. */
static void *copy_descriptor(mirror *m, const void *from, size_t known)
{
    size_t size = *(const size_t *)from < known ? *(const size_t *)from : known;
    void *copy = calloc(1, known);
    if (!copy || m->copy_count == MOST_COPIES)
        device_fail("no room for a descriptor");
    memcpy(copy, from, size);
    *(size_t *)copy = size;
    return m->copies[m->copy_count++] = copy;
}

/* A tensor that was added to a descriptor has to be added here; the other fields of any take less than one. */
static void expect_all_tensors(const form *f)
{
    size_t known = f->unread + (size_t)(f->tensors[0].count + f->tensors[1].count);
    if (f->size - known * sizeof(csa_tensor) >= sizeof(csa_tensor))
        device_fail("a descriptor of %zu bytes has more than the %zu tensors known here", f->size, known);
}

/* A copy of a descriptor, of what it leads to, too. */
static void *add_descriptor(mirror *m, const form *f, const void *from)
{
    uint8_t *copy = copy_descriptor(m, from, f->size);
    expect_all_tensors(f);
    for (int run = 0; run < 2; run++) {
        csa_tensor *first = (csa_tensor *)(void *)(copy + f->tensors[run].at);
        for (int i = 0; i < f->tensors[run].count && (first->ndim || !f->tensors[run].whole); i++)
            add_tensor(m, first + i);
    }
    for (int i = 0; i < 3; i++) {
        const void **inner = (const void **)(void *)(copy + f->nested[i].at);
        const csa_tensor *with = (const csa_tensor *)(void *)(copy + f->nested[i].with);
        if (f->nested[i].form && *inner && (!f->nested[i].with || with->ndim))
            *inner = add_descriptor(m, f->nested[i].form, *inner);
    }
    csa_cache *cache = (csa_cache *)(void *)copy;
    if (f->scales && cache->kv.ndim && cache->kv.dtype != CSA_BF16) { /* else they are not read */
        add_scale(m, &cache->k_scale);
        add_scale(m, &cache->v_scale);
    }
    if (f->workspace)
        m->workspace = (csa_workspace *)(void *)(copy + f->workspace);
    csa_workspace *scratch = (csa_workspace *)(void *)(copy + f->scratch);
    if (f->scratch && scratch->bytes)
        add_place(m, &scratch->data, scratch->data, (uint8_t *)scratch->data + scratch->bytes);
    return copy;
}

static void add_workspace(mirror *m, csa_workspace *w)
{
    m->workspace = w->data && w->bytes ? w : NULL;
    if (m->workspace)
        add_place(m, &w->data, w->data, (uint8_t *)w->data + w->bytes);
}

/* Does `move` to all of a span. Past a gigabyte it must be a test's sparse mapping, which would fill a machine
 * if it were copied: then only to pages that the host has. The copy's others stay as they were allocated. */
static void each_part(const device *d, const span *s,
                      void (*move)(const device *, uint8_t *, uint8_t *, size_t))
{
    enum { WINDOW = 1024 };
    unsigned char there[WINDOW];
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *end = s->host + s->bytes, *first = s->host - (uintptr_t)s->host % page;
    if (s->bytes <= (size_t)1 << 30) {
        move(d, s->host, s->copy, s->bytes);
        return;
    }
    for (size_t i = 0; first < end; first += page, i = (i + 1) % WINDOW) {
        size_t left = (size_t)(end - first);
        if (i == 0 && mincore(first, left < WINDOW * page ? left : WINDOW * page, there) != 0)
            device_fail("%zu bytes of a tensor are not all mapped", s->bytes);
        uint8_t *from = first > s->host ? first : s->host, *past = left < page ? end : first + page;
        if (there[i] & 1)
            move(d, from, s->copy + (from - s->host), (size_t)(past - from));
    }
}

static void move_in(const device *d, uint8_t *host, uint8_t *copy, size_t bytes)
{
    d->copy_in(copy, host, bytes);
}

/* Only what has changed is written: inputs may be read-only, or shared with another thread's call. */
static void move_out(const device *d, uint8_t *host, uint8_t *copy, size_t bytes)
{
    enum { CHUNK = 1 << 16, STEP = 64 };
    uint8_t chunk[CHUNK];
    for (size_t at = 0; at < bytes; at += CHUNK) {
        size_t part = bytes - at < CHUNK ? bytes - at : CHUNK;
        d->copy_out(chunk, copy + at, part);
        for (size_t i = 0; i < part && memcmp(host + at, chunk, part) != 0; i += STEP) {
            size_t step = part - i < STEP ? part - i : STEP;
            if (memcmp(host + at + i, chunk + i, step) != 0)
                memcpy(host + at + i, chunk + i, step);
        }
    }
}

/* Allocates and fills one span for each set of overlapping places, and makes their pointers lead there. */
static void copy_in(mirror *m)
{
    for (int i = 0, next; i < m->place_count; i = next) {
        span s = {.host = m->places[i].first};
        uint8_t *end = m->places[i].end;
        for (next = i + 1; next < m->place_count && m->places[next].first < end; next++)
            end = m->places[next].end > end ? m->places[next].end : end;
        s.bytes = (size_t)(end - s.host);
        s.copy = m->device->allocate(s.bytes, (uintptr_t)s.host % DEVICE_ALIGNMENT);
        each_part(m->device, &s, move_in);
        for (int j = i; j < next; j++) {
            uint8_t *pointer;
            memcpy(&pointer, m->places[j].pointer, sizeof pointer);
            pointer = s.copy + (pointer - s.host);
            memcpy(m->places[j].pointer, &pointer, sizeof pointer);
        }
        m->spans[m->span_count++] = s;
    }
}

/* All but the span that begins at `except`. */
static void copy_out(mirror *m, const void *except)
{
    m->device->synchronise();
    for (int i = 0; i < m->span_count; i++) {
        if (m->spans[i].host != except)
            each_part(m->device, &m->spans[i], move_out);
        m->device->release(m->spans[i].copy, m->spans[i].bytes);
    }
    for (int i = 0; i < m->copy_count; i++)
        free(m->copies[i]);
}

/* ---- Workspaces --------------------------------------------------------------------------------- */

/* On cuda a step's workspace has to be warmed up before its first use, and belongs to the back end from then
 * on. Programs for the host do not know that; one workspace may even serve several back ends in turn. So the
 * mirror remembers how calls left the latest workspaces, and warms up one that looks different. What a step
 * leaves behind for the next one is thus still the back end's affair. */
typedef struct left {
    const void *data;
    size_t bytes;
    csa_backend backend;
    uint64_t sum;
} left;

static struct {
    pthread_mutex_t lock;
    left all[64];
    unsigned next;
} latest = {.lock = PTHREAD_MUTEX_INITIALIZER};

static left state_of(const csa_context *context, csa_workspace w)
{
    left now = {w.data, w.bytes, context->backend, 0};
    for (size_t i = 0; i + 8 <= w.bytes; i += 8) {
        uint64_t word;
        memcpy(&word, (const uint8_t *)w.data + i, sizeof word);
        now.sum = ((now.sum ^ word) * 0x9E3779B97F4A7C15) ^ (now.sum >> 29);
    }
    return now;
}

static bool is_warm(const csa_context *context, csa_workspace w)
{
    left now = state_of(context, w);
    bool found = false;
    pthread_mutex_lock(&latest.lock);
    for (int i = 0; i < 64 && !found; i++) {
        const left *l = &latest.all[i];
        found = l->data == now.data && l->bytes == now.bytes && l->backend == now.backend && l->sum == now.sum;
    }
    pthread_mutex_unlock(&latest.lock);
    return found;
}

static void remember(const csa_context *context, csa_workspace w)
{
    left now = state_of(context, w);
    pthread_mutex_lock(&latest.lock);
    latest.all[latest.next++ % 64] = now;
    pthread_mutex_unlock(&latest.lock);
}

typedef csa_status (*warm_up)(const csa_context *context, const csa_serving *serving, csa_workspace workspace);

static warm_up next_warm_up(void)
{
    warm_up next;
    find_next("csa_warm_up", &next);
    return next;
}

/* Is this what warming up needs? Then the call is going to touch the workspace. */
static bool can_warm_up(const csa_context *context, const csa_serving *serving, csa_workspace w)
{
    __typeof__(&csa_workspace_size) next;
    size_t needed = 0;
    csa_context_options options = {
        .size = sizeof options, .backend = context->backend, .scratch_limit = context->scratch_limit};
    find_next("csa_workspace_size", &next);
    return w.data && (uintptr_t)w.data % 256 == 0 && next(&options, serving, &needed) == CSA_OK && needed > 0 &&
           needed <= w.bytes;
}

/* ---- The dry run -------------------------------------------------------------------------------- */

typedef struct dry_run {
    csa_context context; /* first: from it, a stage finds the rest */
    csa_stages stages;
    csa_compat_stages compat;
    csa_plan plan;
    csa_serving serving; /* of a step: what its workspace has to be warmed up for */
} dry_run;

#define DRY(name, type)                                               \
    static csa_status dry_##name(const csa_context *c, const type *a) \
    {                                                                 \
        (void)c;                                                      \
        (void)a;                                                      \
        return CSA_OK;                                                \
    }
#define DRY_TOKENS(name, type)                                                        \
    static csa_status dry_##name(const csa_context *c, const type *a, int64_t tokens) \
    {                                                                                 \
        (void)c;                                                                      \
        (void)a;                                                                      \
        (void)tokens;                                                                 \
        return CSA_OK;                                                                \
    }

DRY(prepare, csa_prepare_args)
DRY(summarize, csa_summarize_args)
DRY(score, csa_score_args)
DRY(select, csa_select_args)
DRY(attend, csa_attend_args)
DRY(gate, csa_gate_args)
DRY_TOKENS(pack, csa_compat_pack_args)
DRY(schedule, csa_compat_schedule_args)
DRY(compat_score, csa_compat_score_args)
DRY_TOKENS(metadata, csa_compat_metadata_args)
DRY(pages, csa_compat_pages_args)
DRY(attend_paged, csa_compat_attend_paged_args)
DRY(gather, csa_compat_gather_args)
DRY(attend_ragged, csa_compat_attend_ragged_args)
DRY(stage, csa_compat_stage_args)

static csa_status note_serving(const csa_context *c, const csa_plan *plan, const csa_tensor *query,
                               const csa_tensor *kv, int64_t regions, int32_t topk)
{
    int64_t prefill = plan ? plan->shape.tokens : 0;
    ((dry_run *)(void *)c)->serving = (csa_serving){.size = sizeof(csa_serving),
                                                    .regions = regions,
                                                    .decode_tokens = query->shape[0] - prefill,
                                                    .prefill_tokens = prefill,
                                                    .groups = (int32_t)query->shape[1],
                                                    .heads = (int32_t)query->shape[2],
                                                    .block_size = (int32_t)kv->shape[2],
                                                    .topk = topk,
                                                    .kv_dtype = kv->dtype};
    return CSA_OK;
}

static csa_status dry_step(const csa_context *c, const csa_plan *plan, const csa_step_args *a)
{
    return note_serving(c, plan, &a->query, &a->cache->kv, a->regions, a->topk);
}

static csa_status dry_layer(const csa_context *c, const csa_plan *plan, const csa_layer_args *a)
{
    return note_serving(c, plan, &a->prepare->query, &a->prepare->cache->kv, a->regions, a->topk);
}

/* What a back end's table has beyond stages stays. */
static void prepare_dry_run(dry_run *d, const csa_context *context)
{
    *d = (dry_run){.context = *context, .stages = *context->stages};
    csa_stages *s = &d->stages;
    s->prepare = dry_prepare;
    s->summarize_decode = s->summarize_verify = s->summarize_prefill = s->summarize_metadata = dry_summarize;
    s->score = dry_score;
    s->select = dry_select;
    s->attend = dry_attend;
    s->gate = dry_gate;
    s->step = dry_step;
    s->layer = dry_layer;
    s->compat = s->compat ? &d->compat : NULL;
    d->compat.pack = dry_pack;
    d->compat.schedule = dry_schedule;
    d->compat.score = dry_compat_score;
    d->compat.metadata = dry_metadata;
    d->compat.pages = dry_pages;
    d->compat.attend_paged = dry_attend_paged;
    d->compat.gather = dry_gather;
    d->compat.attend_ragged = dry_attend_ragged;
    d->compat.stage = dry_stage;
    d->context.stages = s;
    d->context.check = false;
}

/* A call of the library, whatever its arguments. */
typedef csa_status (*real_call)(const csa_context *context, const csa_plan *plan, const void *args);

static bool accepted(dry_run *d, real_call call, const csa_context *context, const csa_plan *plan,
                     const void *args)
{
    prepare_dry_run(d, context);
    if (plan) {
        d->plan = *plan;
        d->plan.context = plan->context == context ? &d->context : plan->context;
        plan = &d->plan;
    }
    return call(&d->context, plan, args) == CSA_OK;
}

/* ---- The calls ---------------------------------------------------------------------------------- */

static atomic_long mirrored_calls;

__attribute__((destructor)) static void say_how_many(void)
{
    if (getenv("CSA_MIRROR_COUNT"))
        fprintf(stderr, "mirror: %ld calls\n", atomic_load(&mirrored_calls));
}

static csa_status run_mirrored(mirror *m, const dry_run *dry, real_call call, const csa_context *context,
                               const csa_plan *plan, const void *args)
{
    csa_workspace host = m->workspace ? *m->workspace : (csa_workspace){0};
    bool cold = m->workspace && can_warm_up(context, &dry->serving, host) && !is_warm(context, host);
    copy_in(m);
    csa_status status = cold ? next_warm_up()(context, &dry->serving, *m->workspace) : CSA_OK;
    if (status == CSA_OK)
        status = call(context, plan, args);
    bool keep = status != CSA_OK && cold; /* what was refused shall have written nothing, and we have */
    copy_out(m, keep ? host.data : NULL);
    if (host.data && !keep)
        remember(context, host);
    atomic_fetch_add(&mirrored_calls, 1);
    return status;
}

static csa_status mirrored(const form *f, real_call call, const csa_context *context, const csa_plan *plan,
                           const void *args)
{
    mirror m = {.device = device_for(context)};
    dry_run dry;
    if (!m.device || !accepted(&dry, call, context, plan, args))
        return call(context, plan, args);
    const void *copy = add_descriptor(&m, f, args);
    if (m.workspace && dry.serving.decode_tokens + dry.serving.prefill_tokens > 0)
        add_workspace(&m, m.workspace);
    else
        m.workspace = NULL; /* no token needs none: whatever it is, nobody looks at it */
    return run_mirrored(&m, &dry, call, context, plan, copy);
}

csa_status csa_warm_up(const csa_context *context, const csa_serving *serving, csa_workspace workspace)
{
    mirror m = {.device = device_for(context)};
    csa_workspace host = workspace;
    if (!m.device || !can_warm_up(context, serving, workspace))
        return next_warm_up()(context, serving, workspace);
    add_workspace(&m, &workspace);
    copy_in(&m);
    csa_status status = next_warm_up()(context, serving, workspace);
    copy_out(&m, NULL);
    remember(context, host);
    return status;
}

/* Defines call_<name>: the library's call, its type forgotten. */
#define CALL(name, ...)                                                                               \
    static csa_status call_##name(const csa_context *context, const csa_plan *plan, const void *args) \
    {                                                                                                 \
        __typeof__(&name) next;                                                                       \
        (void)plan;                                                                                   \
        find_next(#name, &next);                                                                      \
        return next(__VA_ARGS__);                                                                     \
    }

/* MIRROR(call, arguments, fields of their form...); AT(field) is an offset in them. */
#define AT(field) offsetof(args_type, field)
#define MIRROR(name, type, ...)                                         \
    CALL(name, context, args)                                           \
    csa_status name(const csa_context *context, const type *args)       \
    {                                                                   \
        typedef type args_type;                                         \
        static const form f = {.size = sizeof(args_type), __VA_ARGS__}; \
        return mirrored(&f, call_##name, context, NULL, args);          \
    }
#define MIRROR_PLANNED(name, type, ...)                                                 \
    CALL(name, context, plan, args)                                                     \
    csa_status name(const csa_context *context, const csa_plan *plan, const type *args) \
    {                                                                                   \
        typedef type args_type;                                                         \
        static const form f = {.size = sizeof(args_type), __VA_ARGS__};                 \
        return mirrored(&f, call_##name, context, plan, args);                          \
    }

#define RUN(first, number)                 \
    {                                      \
        .at = AT(first), .count = (number) \
    }
#define TENSORS(...) .tensors = {__VA_ARGS__}
#define LEADS_TO(field, what)            \
    {                                    \
        .at = AT(field), .form = &(what) \
    }
#define NESTED(...) .nested = {__VA_ARGS__}
#define TOKENS      LEADS_TO(tokens, tokens_form)
#define CACHE       LEADS_TO(cache, cache_form)
#define ROWS(field) LEADS_TO(field, rows_form)
#define STEP                                                                               \
    TENSORS(RUN(index_query, 6), RUN(selected, 1)), NESTED(TOKENS, CACHE, ROWS(rows_out)), \
        .workspace = AT(workspace)

CALL(csa_prepare, context, args)
csa_status csa_prepare(const csa_context *context, const csa_prepare_args *args)
{
    return mirrored(&prepare_form, call_csa_prepare, context, NULL, args);
}

MIRROR(csa_summarize_decode, csa_summarize_args, TENSORS(RUN(key, 2)), .unread = 1, NESTED(TOKENS, CACHE))
MIRROR(csa_summarize_verify, csa_summarize_args, TENSORS(RUN(key, 2)), .unread = 1, NESTED(TOKENS, CACHE))
MIRROR(csa_summarize_prefill, csa_summarize_args, TENSORS(RUN(key, 3)), NESTED(TOKENS, CACHE))
MIRROR(csa_summarize_metadata, csa_summarize_args, TENSORS(RUN(metadata, 1)), .unread = 2, NESTED(TOKENS))
MIRROR(csa_score, csa_score_args, TENSORS(RUN(query, 3)), NESTED(TOKENS, CACHE, ROWS(rows_out)))
MIRROR(csa_select, csa_select_args, TENSORS(RUN(scores, 3)))
MIRROR(csa_attend, csa_attend_args, TENSORS(RUN(query, 5)), NESTED(TOKENS, CACHE, ROWS(rows)),
       .scratch = AT(workspace))
MIRROR(csa_gate, csa_gate_args, TENSORS(RUN(attention, 4)))
MIRROR(csa_decode, csa_step_args, STEP)
MIRROR_PLANNED(csa_prefill, csa_step_args, STEP)
MIRROR_PLANNED(csa_layer, csa_layer_args, TENSORS(RUN(z, 5), RUN(selected, 1)),
               NESTED(LEADS_TO(prepare, prepare_form), ROWS(rows_out)), .workspace = AT(workspace))

MIRROR(csa_compat_pack, csa_compat_pack_args, TENSORS(RUN(packed, 1), RUN(page_table, 2)),
       NESTED(TOKENS, CACHE, ROWS(rows_out)))
MIRROR(csa_compat_schedule, csa_compat_schedule_args, TENSORS(RUN(lengths, 2)))
MIRROR(csa_compat_score, csa_compat_score_args, TENSORS(RUN(query, 6)))
MIRROR(csa_compat_prefill_metadata, csa_compat_metadata_args, TENSORS(RUN(selected, 3)),
       NESTED(TOKENS, ROWS(rows_out)))
MIRROR(csa_compat_pages, csa_compat_pages_args, TENSORS(RUN(selected, 1), RUN(page_indptr, 4)),
       NESTED(TOKENS, {.at = AT(cache), .form = &cache_form, .with = AT(pages)}))
MIRROR(csa_compat_attend_paged, csa_compat_attend_paged_args, TENSORS(RUN(query, 7)), NESTED(CACHE))
MIRROR(csa_compat_gather, csa_compat_gather_args, TENSORS(RUN(selected, 4)), NESTED(TOKENS, CACHE))
MIRROR(csa_compat_attend_ragged, csa_compat_attend_ragged_args, TENSORS(RUN(query, 6)))
MIRROR(csa_compat_stage, csa_compat_stage_args, TENSORS(RUN(staged, 4)), NESTED(TOKENS, CACHE))
