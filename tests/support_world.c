/* The second half of support.h. SPDX-License-Identifier: Apache-2.0 */
#include "support.h"

#include <pthread.h>

/* ---- Threads and contexts ----------------------------------------------------------------------- */

enum { POOL_THREADS = 6 };

typedef struct job {
    struct job *next;
    csa_task task;
    void *data;
    int32_t count, taken, finished;
} job;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    pthread_t threads[POOL_THREADS];
    job *jobs; /* that have tasks left to take */
    bool started, stop;
} pool = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

/* Takes one task of a job and runs it; called, and returns, with the lock held. */
static void run_one(job *j)
{
    int32_t task = j->taken++;
    if (j->taken == j->count) {
        job **link = &pool.jobs;
        while (*link != j)
            link = &(*link)->next;
        *link = j->next;
    }
    pthread_mutex_unlock(&pool.lock);
    j->task(j->data, task);
    pthread_mutex_lock(&pool.lock);
    if (++j->finished == j->count)
        pthread_cond_broadcast(&pool.done);
}

static void *pool_thread(void *nothing)
{
    pthread_mutex_lock(&pool.lock);
    while (!pool.stop)
        if (pool.jobs)
            run_one(pool.jobs);
        else
            pthread_cond_wait(&pool.work, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    return nothing;
}

static void stop_pool(void)
{
    pthread_mutex_lock(&pool.lock);
    pool.stop = true;
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < POOL_THREADS; i++)
        pthread_join(pool.threads[i], NULL);
}

static void start_pool(void)
{
    pool.started = true;
    for (int i = 0; i < POOL_THREADS; i++)
        if (pthread_create(&pool.threads[i], NULL, pool_thread, NULL) != 0)
            abort();
    atexit(stop_pool);
}

void pool_for(void *unused, int32_t count, csa_task task, void *task_data)
{
    (void)unused;
    job j = {.task = task, .data = task_data, .count = count};
    pthread_mutex_lock(&pool.lock);
    if (!pool.started)
        start_pool();
    j.next = pool.jobs;
    pool.jobs = &j;
    pthread_cond_broadcast(&pool.work);
    while (j.taken < j.count)
        run_one(&j);
    while (j.finished < j.count)
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

void serial_for(void *unused, int32_t count, csa_task task, void *task_data)
{
    (void)unused;
    for (int32_t i = 0; i < count; i++)
        task(task_data, i);
}

void reverse_for(void *unused, int32_t count, csa_task task, void *task_data)
{
    (void)unused;
    for (int32_t i = count - 1; i >= 0; i--)
        task(task_data, i);
}

typedef struct foreign {
    pthread_t thread;
    csa_task task;
    void *data;
    int32_t index;
} foreign;

static void *foreign_thread(void *argument)
{
    const foreign *f = argument;
    f->task(f->data, f->index);
    return NULL;
}

void foreign_for(void *unused, int32_t count, csa_task task, void *task_data)
{
    (void)unused;
    foreign *all = malloc((size_t)count * sizeof *all);
    for (int32_t i = 0; i < count; i++) {
        all[i] = (foreign){.task = task, .data = task_data, .index = i};
        if (pthread_create(&all[i].thread, NULL, foreign_thread, &all[i]) != 0)
            abort();
    }
    for (int32_t i = 0; i < count; i++)
        pthread_join(all[i].thread, NULL);
    free(all);
}

_Noreturn static void skip_program(const char *format, const char *name, const char *reason)
{
    print_message(format, name, reason);
    exit(77); /* what ctest takes for that */
}

bool test_on_cuda(void)
{
    const char *name = getenv("CSA_TEST_BACKEND");
    return name && strcmp(name, "cuda") == 0;
}

void test_needs_host(const char *reason)
{
    if (test_on_cuda())
        skip_program("skipped %s: %s\n", "on cuda", reason);
}

static void take_tier(csa_context_options *options, const char *tier)
{
    char text[256];
    options->backend = strcmp(tier, "ref") == 0 ? CSA_BACKEND_REF : CSA_BACKEND_CPU;
    options->tier = options->backend == CSA_BACKEND_CPU ? tier : NULL;
    csa_backend_describe(options->backend, text, sizeof text);
    if (options->tier && !strstr(text, tier))
        skip_program("skipped: no tier %s here: %s\n", tier, text);
}

static void take_backend(csa_context_options *options, const char *name)
{
    const char *preloaded = getenv("LD_PRELOAD");
    char text[256] = "there is none of this name";
    options->backend = CSA_BACKEND_CUDA;
    while (options->backend && strcmp(csa_backend_name(options->backend), name) != 0)
        options->backend--;
    if (!options->backend || csa_backend_describe(options->backend, text, sizeof text) != CSA_OK)
        skip_program("skipped: no back end %s here: %s\n", name, text);
    CHECKF(!test_on_cuda() || (preloaded && strstr(preloaded, "csa_mirror")),
           "%s cannot use a test's memory: put the mirror in front (docs/TESTING.md)", name);
    if (test_on_cuda())
        options->tier = getenv("CSA_TEST_TIER");
}

csa_context_options test_options(csa_context_options options)
{
    const char *tier = getenv("CSA_TEST_TIER"), *backend = getenv("CSA_TEST_BACKEND");
    options.size = sizeof options;
    if (backend && options.backend == CSA_BACKEND_DEFAULT)
        take_backend(&options, backend);
    else if (tier && options.backend == CSA_BACKEND_DEFAULT)
        take_tier(&options, tier);
    if (TEST_TSAN && !options.parallel_for) {
        options.parallel_for = pool_for;
        options.threads = options.threads ? options.threads : 4;
    }
    return options;
}

csa_context *test_context(csa_context_options options)
{
    csa_context *context = NULL;
    options = test_options(options);
    CHECK_OK(csa_context_create(&options, &context));
    return context;
}

/* ---- A world ------------------------------------------------------------------------------------ */

static void fill_in(world_shape *s)
{
    int32_t *fields[] = {&s->groups, &s->heads,    &s->index_heads, &s->block_size,
                         &s->topk,   &s->requests, &s->query_len,   &s->rotary};
    const int32_t defaults[] = {1, 1, 4, 16, 4, 1, 1, 64};
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++)
        *fields[i] = *fields[i] ? *fields[i] : defaults[i];
    s->kv_dtype = s->kv_dtype ? s->kv_dtype : CSA_BF16;
    s->max_length = s->max_length ? s->max_length : 100;
    s->max_length = s->max_length > s->query_len ? s->max_length : s->query_len;
    if (!s->ring_capacity)
        s->ring_capacity = s->query_len > 2 ? 6 + s->query_len : 8;
}

/* Gaps for views, where the world has any. */
static test_random *gaps(world *w)
{
    return w->shape.strided ? &w->random : NULL;
}

static csa_tensor filled(world *w, const char *name, csa_dtype dtype, double scale, int n0, int n1, int n2,
                         int n3)
{
    int ndim = n3 >= 0 ? 4 : n2 >= 0 ? 3 : n1 >= 0 ? 2 : 1;
    csa_tensor t = arena_tensor(&w->memory, name, gaps(w), dtype, ndim, n0, n1, n2, n3);
    if (scale != 0)
        tensor_randomise(&t, &w->random, scale);
    return t;
}

static const float *scale_value(world *w, const char *name, float value)
{
    csa_tensor t = arena_tensor(&w->memory, name, NULL, CSA_F32, 1, 1);
    tensor_put(&t, (double)value, 0, 0, 0, 0);
    return t.data;
}

/* KV and summaries of a block side by side in one buffer, with gaps between rows, groups and blocks. */
static void make_shared_cache(world *w)
{
    const world_shape *s = &w->shape;
    int64_t item = tensor_itemsize(s->kv_dtype), per_block = s->block_size / CSA_REGION;
    int64_t token = CSA_KV_SIZE + 8 * random_between(&w->random, 0, 2);
    int64_t group = s->block_size * token + 8 * random_between(&w->random, 0, 2);
    int64_t summary = CSA_SUMMARY_SIZE + 8 * random_between(&w->random, 0, 2);
    int64_t kv_bytes = s->groups * group * item, block = kv_bytes + per_block * summary + 16;
    buffer *b = arena_buffer(&w->memory, "kv and summaries", (size_t)(w->blocks * block));
    w->cache.kv = csa_tensor_4d(b->data, s->kv_dtype, w->blocks, s->groups, s->block_size, CSA_KV_SIZE);
    w->cache.summaries = csa_tensor_3d(b->data + kv_bytes, CSA_E4M3, w->blocks, per_block, CSA_SUMMARY_SIZE);
    w->cache.kv.stride[0] = block / item;
    w->cache.kv.stride[1] = group;
    w->cache.kv.stride[2] = token;
    w->cache.summaries.stride[0] = block;
    w->cache.summaries.stride[1] = summary;
    buffer_cover(b, &w->cache.kv);
    buffer_cover(b, &w->cache.summaries);
}

static void make_cache(world *w)
{
    const world_shape *s = &w->shape;
    int blocks = (int)w->blocks, ring_rows = (int)(s->requests * s->ring_capacity) + 3;
    w->cache.size = sizeof w->cache;
    if (s->strided) {
        make_shared_cache(w);
    } else {
        w->cache.kv = filled(w, "kv", s->kv_dtype, 0, blocks, s->groups, s->block_size, CSA_KV_SIZE);
        w->cache.summaries =
            filled(w, "summaries", CSA_E4M3, 0, blocks, s->block_size / 8, CSA_SUMMARY_SIZE, -1);
    }
    tensor_randomise(&w->cache.kv, &w->random, 1);
    tensor_randomise(&w->cache.summaries, &w->random, 1);
    w->cache.ring = filled(w, "ring", CSA_BF16, 1, ring_rows, CSA_RING_SIZE, -1, -1);
    w->cache.ring_capacity = s->ring_capacity;
    w->cache.k_scale = scale_value(w, "k_scale", 0.75F);
    w->cache.v_scale = scale_value(w, "v_scale", 1.5F);
}

/* Lengths, then how many blocks and columns they need. */
static void make_lengths(world *w)
{
    const world_shape *s = &w->shape;
    int64_t longest = 0;
    w->lengths = malloc((size_t)s->requests * sizeof *w->lengths);
    for (int r = 0; r < s->requests; r++) {
        w->lengths[r] =
            s->exact_length ? s->exact_length : random_between(&w->random, s->query_len, s->max_length);
        w->blocks += (w->lengths[r] + s->block_size - 1) / s->block_size;
        longest = w->lengths[r] > longest ? w->lengths[r] : longest;
    }
    w->blocks += random_between(&w->random, 1, 3);
    w->columns = (longest + s->block_size - 1) / s->block_size + random_between(&w->random, 1, 3);
    w->regions = (longest + CSA_REGION - 1) / CSA_REGION + random_between(&w->random, 0, 3);
}

static void make_table(world *w)
{
    const world_shape *s = &w->shape;
    int32_t *free_blocks = malloc((size_t)w->blocks * sizeof *free_blocks), next = 0;
    for (int32_t i = 0; i < w->blocks; i++)
        free_blocks[i] = i;
    random_shuffle(&w->random, free_blocks, w->blocks);
    w->step.block_table = filled(w, "block_table", CSA_I32, 0, s->requests, (int)w->columns, -1, -1);
    for (int r = 0; r < s->requests; r++)
        for (int64_t column = 0; column < w->columns; column++) {
            int32_t junk[] = {-1, (int32_t)w->blocks, INT32_MAX, INT32_MIN};
            bool live = column * s->block_size < w->lengths[r];
            int32_t block = live ? free_blocks[next++] : junk[random_between(&w->random, 0, 3)];
            *(int32_t *)tensor_at(&w->step.block_table, r, column, 0, 0) = block;
        }
    free(free_blocks);
}

int64_t world_slot(const world *w, int64_t request, int64_t position)
{
    int64_t size = w->shape.block_size;
    int32_t block = *(const int32_t *)tensor_at(&w->step.block_table, request, position / size, 0, 0);
    return block * size + position % size;
}

static void make_tokens(world *w)
{
    const world_shape *s = &w->shape;
    int tokens = (int)w->tokens;
    csa_tokens *k = &w->step;
    k->size = sizeof *k;
    k->query_len = s->query_len;
    k->slots = filled(w, "slots", CSA_I64, 0, tokens, -1, -1, -1);
    k->positions = filled(w, "positions", CSA_I64, 0, tokens, -1, -1, -1);
    k->ring_base = filled(w, "ring_base", CSA_I64, 0, s->requests, -1, -1, -1);
    for (int64_t t = 0; t < w->tokens; t++) {
        int64_t request = t / s->query_len, position = w->lengths[request] - s->query_len + t % s->query_len;
        int64_t slot = world_slot(w, request, position);
        if (s->inactive && random_chance(&w->random, 30)) {
            bool by_slot = random_chance(&w->random, 50);
            slot = by_slot ? -random_between(&w->random, 1, 9) : slot;
            position = by_slot ? position : -random_between(&w->random, 1, 9);
        }
        *(int64_t *)tensor_at(&k->slots, t, 0, 0, 0) = slot;
        *(int64_t *)tensor_at(&k->positions, t, 0, 0, 0) = position;
    }
    for (int64_t r = 0; r < s->requests; r++) /* the last request's ring comes first */
        *(int64_t *)tensor_at(&k->ring_base, r, 0, 0, 0) = (s->requests - 1 - r) * s->ring_capacity + 1;
}

static void make_step(world *w)
{
    const world_shape *s = &w->shape;
    int t = (int)w->tokens, g = s->groups, h = s->heads, rows = (int)w->rows, regions = (int)w->regions;
    int columns = (s->topk < regions ? s->topk : regions) + 1;
    w->index_query = filled(w, "index query", CSA_E4M3, 1, t, g, s->index_heads, CSA_SUMMARY_SIZE);
    w->index_weights = filled(w, "index weights", CSA_F32, 1, t, g, s->index_heads, -1);
    w->query = filled(w, "query", CSA_BF16, 1, t, g, h, CSA_HEAD_SIZE);
    w->gate = filled(w, "gate", CSA_BF16, 1, t, g, h, -1);
    w->scale = 0.2F; /* more contrast than 192^-0.5 */
    w->scores = filled(w, "scores", CSA_F32, 0, rows, regions, -1, -1);
    w->selected = filled(w, "selected", CSA_I64, 0, rows, columns, -1, -1);
    w->out = filled(w, "out", CSA_BF16, 0, t, g, h, CSA_HEAD_SIZE);
    w->lse = filled(w, "lse", CSA_F32, 0, t, g, h, -1);
    w->rows_out.size = sizeof w->rows_out;
    w->rows_out.active = filled(w, "rows.active", CSA_BOOL, 0, rows, -1, -1, -1);
    w->rows_out.positions = filled(w, "rows.positions", CSA_I64, 0, rows, -1, -1, -1);
    w->rows_out.current = filled(w, "rows.current", CSA_I64, 0, rows, -1, -1, -1);
    w->rows_out.lengths = filled(w, "rows.lengths", CSA_I32, 0, rows, -1, -1, -1);
    w->rows_out.topk_lengths = filled(w, "rows.topk_lengths", CSA_I32, 0, rows, -1, -1, -1);
}

static void make_prepare(world *w)
{
    const world_shape *s = &w->shape;
    csa_prepare_args *p = &w->prepare;
    int t = (int)w->tokens, g = s->groups, h = s->heads, positions = (int)(w->columns * s->block_size);
    int index_heads = s->index_heads == 4 ? 4 : 2;
    *p = (csa_prepare_args){.size = sizeof *p, .tokens = &w->step, .cache = &w->cache, .eps = 1e-5F};
    p->index_query = filled(w, "prepare.index_query", CSA_BF16, 1, t, g, index_heads, CSA_SUMMARY_SIZE);
    p->index_key = filled(w, "index_key", CSA_BF16, 1, t, CSA_SUMMARY_SIZE, -1, -1);
    p->index_weights = filled(w, "prepare.index_weights", CSA_BF16, 1, t, g, index_heads, -1);
    p->index_query_norm = filled(w, "index_query_norm", CSA_BF16, 1, CSA_SUMMARY_SIZE, -1, -1, -1);
    p->index_key_norm = filled(w, "index_key_norm", CSA_BF16, 1, CSA_SUMMARY_SIZE, -1, -1, -1);
    p->index_key_bias = filled(w, "index_key_bias", CSA_BF16, 1, CSA_SUMMARY_SIZE, -1, -1, -1);
    p->index_rope = filled(w, "index_rope", CSA_F32, 0.7, positions, CSA_INDEX_ROTARY, -1, -1);
    p->index_query_out = filled(w, "index_query_out", CSA_E4M3, 0, t, g, CSA_INDEX_HEADS, CSA_SUMMARY_SIZE);
    p->index_key_out = filled(w, "index_key_out", CSA_BF16, 0, t, CSA_SUMMARY_SIZE, -1, -1);
    p->index_weights_out = filled(w, "index_weights_out", CSA_F32, 0, t, g, CSA_INDEX_HEADS, -1);
    p->query = filled(w, "prepare.query", CSA_BF16, 1, t, g, h, CSA_HEAD_SIZE);
    p->key = filled(w, "key", CSA_BF16, 1, t, g, CSA_HEAD_SIZE, -1);
    p->value = filled(w, "value", CSA_BF16, 1, t, g, CSA_HEAD_SIZE, -1);
    p->query_norm = filled(w, "query_norm", CSA_BF16, 1, CSA_HEAD_SIZE, -1, -1, -1);
    p->key_norm = filled(w, "key_norm", CSA_BF16, 1, CSA_HEAD_SIZE, -1, -1, -1);
    if (s->rotary > 0)
        p->rope = filled(w, "rope", CSA_BF16, 0.7, positions, s->rotary, -1, -1);
    p->query_out = filled(w, "query_out", CSA_BF16, 0, t, g, h, CSA_HEAD_SIZE);
    p->key_out = filled(w, "key_out", CSA_BF16, 0, t, g, CSA_HEAD_SIZE, -1);
    p->value_out = filled(w, "value_out", CSA_BF16, 0, t, g, CSA_HEAD_SIZE, -1);
    w->z = filled(w, "z", CSA_BF16, 1, t, CSA_SUMMARY_SIZE, -1, -1);
}

void world_make(world *w, world_shape shape, uint64_t number)
{
    memset(w, 0, sizeof *w);
    fill_in(&shape);
    w->shape = shape;
    w->random = random_of(number, 0x776F726C64);
    w->tokens = (int64_t)shape.requests * shape.query_len;
    w->rows = w->tokens * shape.groups;
    make_lengths(w);
    make_cache(w);
    make_table(w);
    make_tokens(w);
    make_step(w);
    make_prepare(w);
    csa_serving serving = world_serving(w);
    csa_context_options options = test_options((csa_context_options){0});
    CHECK_OK(csa_workspace_size(&options, &serving, &w->workspace.bytes));
    csa_tensor workspace = arena_tensor(&w->memory, "workspace", NULL, CSA_U8, 1,
                                        (int)(w->workspace.bytes ? w->workspace.bytes : 1));
    w->workspace.data = workspace.data;
}

void world_end(world *w)
{
    arena_check(&w->memory);
    arena_free(&w->memory);
    free(w->lengths);
    w->lengths = NULL;
}

csa_serving world_serving(const world *w)
{
    const world_shape *s = &w->shape;
    return (csa_serving){.size = sizeof(csa_serving),
                         .regions = w->regions,
                         .decode_tokens = w->tokens,
                         .prefill_tokens = w->tokens,
                         .groups = s->groups,
                         .heads = s->heads,
                         .index_heads = s->index_heads,
                         .block_size = s->block_size,
                         .topk = s->topk,
                         .kv_dtype = s->kv_dtype};
}

csa_score_args world_score(world *w)
{
    return (csa_score_args){.size = sizeof(csa_score_args),
                            .tokens = &w->step,
                            .cache = &w->cache,
                            .query = w->index_query,
                            .weights = w->index_weights,
                            .scores = w->scores,
                            .rows_out = &w->rows_out};
}

csa_select_args world_select(world *w)
{
    return (csa_select_args){.size = sizeof(csa_select_args),
                             .scores = w->scores,
                             .current = w->rows_out.current,
                             .selected = w->selected,
                             .topk = w->shape.topk};
}

csa_attend_args world_attend(world *w)
{
    return (csa_attend_args){.size = sizeof(csa_attend_args),
                             .tokens = &w->step,
                             .cache = &w->cache,
                             .query = w->query,
                             .selected = w->selected,
                             .gate = w->gate,
                             .out = w->out,
                             .lse = w->lse,
                             .scale = w->scale};
}

csa_step_args world_step(world *w)
{
    return (csa_step_args){.size = sizeof(csa_step_args),
                           .tokens = &w->step,
                           .cache = &w->cache,
                           .index_query = w->index_query,
                           .index_weights = w->index_weights,
                           .query = w->query,
                           .gate = w->gate,
                           .out = w->out,
                           .lse = w->lse,
                           .rows_out = &w->rows_out,
                           .selected = w->selected,
                           .regions = w->regions,
                           .topk = w->shape.topk,
                           .scale = w->scale,
                           .workspace = w->workspace};
}

csa_summarize_args world_summarize(world *w)
{
    return (csa_summarize_args){.size = sizeof(csa_summarize_args),
                                .tokens = &w->step,
                                .cache = &w->cache,
                                .key = w->prepare.index_key_out,
                                .z = w->z};
}

csa_layer_args world_layer(world *w)
{
    return (csa_layer_args){.size = sizeof(csa_layer_args),
                            .prepare = &w->prepare,
                            .z = w->z,
                            .gate = w->gate,
                            .out = w->out,
                            .lse = w->lse,
                            .rows_out = &w->rows_out,
                            .selected = w->selected,
                            .regions = w->regions,
                            .topk = w->shape.topk,
                            .scale = w->scale,
                            .workspace = w->workspace};
}
