/*
 * The cuda back end as an engine uses it: device memory, streams, captured graphs, many rows, large caches.
 * (What its calls compute, all other tests say behind the mirror, docs/TESTING.md.)
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

#include <cuda_runtime_api.h>
#include <pthread.h>

#define CHECK_CUDA(call) expect_cuda(__LINE__, #call, (call))

static void expect_cuda(int line, const char *what, cudaError_t error)
{
    if (error != cudaSuccess)
        test_fail(__FILE__, line, what, "%s", cudaGetErrorString(error));
}

static csa_context *context;
static cudaStream_t stream;
static const char *tier; /* CSA_TEST_TIER */

static csa_context *cuda_context(csa_context_options options)
{
    options.backend = CSA_BACKEND_CUDA;
    options.tier = tier;
    return test_context(options);
}

static int start(void **state)
{
    (void)state;
    context = cuda_context((csa_context_options){0});
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return 0;
}

static int end(void **state)
{
    (void)state;
    csa_context_destroy(context);
    CHECK_CUDA(cudaStreamDestroy(stream));
    return 0;
}

#define skip_if_quick()                                            \
    do {                                                           \
        if (test_quick()) {                                        \
            print_message("skipped: too large for a quick run\n"); \
            skip();                                                \
        }                                                          \
    } while (0)

/* ---- Twins: a world on the host, and the same in device memory ---------------------------------- */

enum { MOST_BUFFERS = 80 };

typedef struct twin {
    world host, device;
    void *memory[MOST_BUFFERS]; /* of the arena's buffers, in their order */
    csa_plan *plan;             /* of all tokens, once asked for */
} twin;

static void *allocate(size_t bytes)
{
    void *memory;
    CHECK_CUDA(cudaMalloc(&memory, bytes ? bytes : 1));
    return memory;
}

/* Every pointer into a buffer of the host's leads to its copy from now on: no other word of a world looks like
 * one. */
static void translate(twin *t)
{
    for (size_t at = 0; at + sizeof(uintptr_t) <= sizeof t->device; at += sizeof(uintptr_t)) {
        uintptr_t word;
        memcpy(&word, (char *)&t->device + at, sizeof word);
        int i = 0;
        for (const buffer *b = t->host.memory.first; b; b = b->next, i++)
            if (word - (uintptr_t)b->data < b->bytes) {
                word = (uintptr_t)t->memory[i] + (word - (uintptr_t)b->data);
                memcpy((char *)&t->device + at, &word, sizeof word);
                break;
            }
    }
    t->device.prepare.tokens = &t->device.step;
    t->device.prepare.cache = &t->device.cache;
    t->device.prepare.stream = stream;
}

static csa_workspace make_workspace(const csa_serving *serving)
{
    csa_context_options options = {.size = sizeof options, .backend = CSA_BACKEND_CUDA};
    csa_workspace w = {0};
    CHECK_OK(csa_workspace_size(&options, serving, &w.bytes));
    w.data = allocate(w.bytes);
    CHECK_OK(csa_warm_up(context, serving, w));
    return w;
}

static void to_device(twin *t)
{
    int i = 0;
    for (const buffer *b = t->host.memory.first; b; b = b->next, i++)
        CHECK_CUDA(cudaMemcpy(t->memory[i], b->data, b->bytes, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaDeviceSynchronize());
}

/* All bytes, gaps too: arena_check then sees what was written there. */
static void to_host(twin *t)
{
    int i = 0;
    CHECK_CUDA(cudaDeviceSynchronize());
    for (const buffer *b = t->host.memory.first; b; b = b->next, i++)
        CHECK_CUDA(cudaMemcpy(b->data, t->memory[i], b->bytes, cudaMemcpyDeviceToHost));
    arena_check(&t->host.memory);
}

static void make_twin(twin *t, world_shape shape, uint64_t number)
{
    memset(t, 0, sizeof *t);
    world_make(&t->host, shape, number);
    t->device = t->host;
    int i = 0;
    for (const buffer *b = t->host.memory.first; b; b = b->next) {
        CHECK(i < MOST_BUFFERS);
        t->memory[i++] = allocate(b->bytes);
    }
    translate(t);
    csa_serving serving = world_serving(&t->host);
    t->device.workspace = make_workspace(&serving);
    to_device(t);
}

static void end_twin(twin *t)
{
    for (int i = 0; i < MOST_BUFFERS; i++)
        CHECK_CUDA(cudaFree(t->memory[i]));
    CHECK_CUDA(cudaFree(t->device.workspace.data));
    csa_plan_destroy(t->plan);
    world_end(&t->host);
}

/* Owners of a planned step's tokens follow from query_start. */
static void add_plan(twin *t)
{
    world *w = &t->host;
    int requests = w->shape.requests;
    int32_t ends[64];
    CHECK(requests < 64);
    for (int i = 0; i <= requests; i++)
        ends[i] = i * w->shape.query_len;
    void *memory = t->memory[MOST_BUFFERS - 1] = allocate(sizeof ends);
    CHECK_CUDA(cudaMemcpy(memory, ends, sizeof ends, cudaMemcpyHostToDevice));
    t->device.step.query_start = csa_tensor_1d(memory, CSA_I32, requests + 1);
    csa_plan_args args = {.size = sizeof args,
                          .tokens = w->tokens,
                          .requests = requests,
                          .regions = w->regions,
                          .groups = w->shape.groups,
                          .topk = w->shape.topk,
                          .invariant = true};
    CHECK_OK(csa_plan_prefill(context, &args, &t->plan));
}

typedef enum kind { DECODE, LAYER, PLANNED_LAYER } kind;

static csa_status queue(kind k, twin *t)
{
    csa_step_args step = world_step(&t->device);
    csa_layer_args layer = world_layer(&t->device);
    step.stream = stream;
    return k == DECODE ? csa_decode(context, &step) : csa_layer(context, t->plan, &layer);
}

/* Requests end after `percent` of their tokens. */
static void set_lengths(world *w, int percent)
{
    int64_t new = w->shape.query_len;
    for (int64_t t = 0; t < w->tokens; t++) {
        int64_t request = t / new, length = w->lengths[request] * percent / 100;
        int64_t position = (length > new ? length : new) - new + t % new;
        *(int64_t *)tensor_at(&w->step.positions, t, 0, 0, 0) = position;
        *(int64_t *)tensor_at(&w->step.slots, t, 0, 0, 0) = world_slot(w, request, position);
    }
}

static void set_scales(world *w, float k, float v)
{
    memcpy((void *)(uintptr_t)w->cache.k_scale, &k, sizeof k);
    memcpy((void *)(uintptr_t)w->cache.v_scale, &v, sizeof v);
}

/* Nothing may rest on what lies in a workspace between two steps. */
static void spoil_workspace(const twin *t, int byte)
{
    CHECK_CUDA(cudaMemset(t->device.workspace.data, byte, t->device.workspace.bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
}

/* ---- Captured graphs ---------------------------------------------------------------------------- */

static cudaGraphExec_t capture(kind k, twin *t)
{
    cudaGraph_t graph;
    cudaGraphExec_t made;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    csa_status status = queue(k, t);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECKF(status == CSA_OK, "%s", test_error());
    CHECK_CUDA(cudaGraphInstantiate(&made, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    return made;
}

/* A graph of short requests replays longer ones, with other scales and whatever lies in the workspace, and
 * leaves what the call itself does. */
static void expect_replays(kind k, world_shape shape)
{
    const int percents[] = {10, 100, 45, 3, 100};
    twin t[2]; /* one replays, the other calls */
    for (int i = 0; i < 2; i++) {
        make_twin(&t[i], shape, 71);
        if (k == PLANNED_LAYER)
            add_plan(&t[i]);
    }
    set_lengths(&t[0].host, 10);
    to_device(&t[0]);
    cudaGraphExec_t graph = capture(k, &t[0]);
    for (int draw = 0; draw < 5; draw++) {
        test_set_draw(draw);
        for (int i = 0; i < 2; i++) {
            set_lengths(&t[i].host, percents[draw]);
            set_scales(&t[i].host, 0.5F + 0.25F * (float)draw, 1.25F - 0.125F * (float)draw);
            to_device(&t[i]);
        }
        spoil_workspace(&t[0], draw % 2 ? 0xFF : 0xA5);
        CHECK_CUDA(cudaGraphLaunch(graph, stream));
        CHECK_OK(queue(k, &t[1]));
        to_host(&t[0]);
        to_host(&t[1]);
        arena_expect_equal(&t[0].host.memory, &t[1].host.memory, NULL);
    }
    CHECK_CUDA(cudaGraphExecDestroy(graph));
    end_twin(&t[0]);
    end_twin(&t[1]);
}

static void graphs_replay_other_lengths(void **state)
{
    (void)state;
    world_shape shape = {.requests = 5, .groups = 2, .heads = 8, .exact_length = 1500, .topk = 70};
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        shape.query_len = 1;
        expect_replays(DECODE, shape);
        expect_replays(LAYER, shape);
        shape.query_len = 3;
        expect_replays(LAYER, shape);
        expect_replays(PLANNED_LAYER, shape);
    }
}

/* ---- The same bits ------------------------------------------------------------------------------ */

static void steps_repeat_themselves(void **state)
{
    (void)state;
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        world_shape shape = {.requests = 4, .groups = 2, .heads = 16, .exact_length = 900, .topk = 100};
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        twin t;
        make_twin(&t, shape, 72);
        uint8_t *first = NULL;
        for (int i = 0; i < 6; i++) {
            to_device(&t);
            spoil_workspace(&t, 51 * i);
            CHECK_OK(queue(DECODE, &t));
            to_host(&t);
            if (!first)
                first = arena_snapshot(&t.host.memory);
            CHECKF(arena_unchanged(&t.host.memory, first), "run %d differs from the first", i);
        }
        free(first);
        end_twin(&t);
    }
}

/* What a decode row gives: its outputs, one behind the other. */
typedef struct row_bits {
    uint8_t bytes[16384];
    size_t count;
} row_bits;

static void add_bits(row_bits *bits, const csa_tensor *t, int64_t token, int64_t rows)
{
    csa_tensor row = tensor_slice(*t, token * rows, rows);
    size_t bytes = (size_t)(tensor_count(&row) * tensor_itemsize(row.dtype));
    CHECK(bits->count + bytes <= sizeof bits->bytes);
    CHECK_CUDA(cudaMemcpy(bits->bytes + bits->count, row.data, bytes, cudaMemcpyDeviceToHost));
    bits->count += bytes;
}

/* Decodes requests [first, first + count) alone; the bits of request `of`. */
static row_bits decode_part(const twin *t, int64_t first, int64_t count, int64_t of)
{
    csa_step_args step = world_step((world *)&t->device);
    csa_tokens tokens = t->device.step;
    csa_tensor *by_token[] = {
        &tokens.block_table, &tokens.slots, &tokens.positions, &tokens.ring_base, &step.index_query,
        &step.index_weights, &step.query,   &step.gate,        &step.out,         &step.lse};
    for (size_t i = 0; i < sizeof by_token / sizeof *by_token; i++)
        *by_token[i] = tensor_slice(*by_token[i], first, count);
    int64_t groups = t->host.shape.groups;
    step.selected = tensor_slice(step.selected, first * groups, count * groups);
    step.tokens = &tokens;
    step.rows_out = NULL;
    step.stream = stream;
    CHECK_OK(csa_decode(context, &step));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    row_bits bits = {.count = 0};
    add_bits(&bits, &t->device.out, of, 1);
    add_bits(&bits, &t->device.lse, of, 1);
    add_bits(&bits, &t->device.selected, of, groups);
    return bits;
}

static void batch_mates_change_nothing(void **state)
{
    (void)state;
    const int64_t batches[] = {9, 65, 129};
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        world_shape shape = {.requests = test_quick() ? 9 : 129, .heads = 8, .exact_length = 1100, .topk = 96};
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        twin t;
        make_twin(&t, shape, 73);
        for (int64_t of = 0; of < 9; of += 4) {
            row_bits alone = decode_part(&t, of, 1, of);
            for (int i = 0; i < 3 && batches[i] <= shape.requests; i++) {
                row_bits among = decode_part(&t, 0, batches[i], of);
                CHECKF(memcmp(&alone, &among, sizeof alone) == 0, "row %d in a batch of %d", (int)of,
                       (int)batches[i]);
            }
        }
        end_twin(&t);
    }
}

/* Attention of the first tokens, with a workspace of so many bytes. */
static void expect_attended_alike(const twin *t, int64_t tokens, size_t bytes)
{
    csa_attend_args attend = world_attend((world *)&t->device);
    csa_tensor *by_token[] = {&attend.query, &attend.gate};
    for (int i = 0; i < 2; i++)
        *by_token[i] = tensor_slice(*by_token[i], 0, tokens);
    csa_tokens step = t->device.step;
    csa_tensor *of_step[] = {&step.block_table, &step.slots, &step.positions, &step.ring_base};
    for (int i = 0; i < 4; i++)
        *of_step[i] = tensor_slice(*of_step[i], 0, tokens);
    csa_tensor out = tensor_slice(attend.out, 0, tokens), lse = tensor_slice(attend.lse, 0, tokens);
    size_t out_bytes = (size_t)tensor_count(&out) * 2, lse_bytes = (size_t)tensor_count(&lse) * 4;
    attend.selected = tensor_slice(attend.selected, 0, tokens * t->host.shape.groups);
    attend.tokens = &step;
    attend.stream = stream;
    attend.workspace = (csa_workspace){bytes ? allocate(bytes) : NULL, bytes};
    attend.out = out, attend.lse = lse;
    attend.out.data = allocate(out_bytes);
    attend.lse.data = allocate(lse_bytes);
    CHECK_OK(csa_attend(context, &attend));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    const struct {
        void *got, *expected;
        size_t bytes;
    } pairs[] = {{attend.out.data, out.data, out_bytes}, {attend.lse.data, lse.data, lse_bytes}};
    for (int i = 0; i < 2; i++) {
        char *got = malloc(2 * pairs[i].bytes);
        CHECK(got != NULL);
        CHECK_CUDA(cudaMemcpy(got, pairs[i].got, pairs[i].bytes, cudaMemcpyDeviceToHost));
        CHECK_CUDA(cudaMemcpy(got + pairs[i].bytes, pairs[i].expected, pairs[i].bytes, cudaMemcpyDeviceToHost));
        CHECKF(memcmp(got, got + pairs[i].bytes, pairs[i].bytes) == 0, "%s of %d tokens with %zu bytes",
               i ? "lse" : "out", (int)tokens, bytes);
        free(got);
        CHECK_CUDA(cudaFree(pairs[i].got));
    }
    CHECK_CUDA(cudaFree(attend.workspace.data));
}

/* Rows are taken whole, by pieces, or by units, which two warps or four share, as there is room and work. */
static void cuts_change_nothing(void **state)
{
    (void)state;
    const size_t room[] = {0, 1 << 20, 16 << 20};
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        world_shape shape = {.requests = 20, .heads = 11, .exact_length = 3000, .topk = 200};
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        twin t;
        make_twin(&t, shape, 82);
        CHECK_OK(queue(DECODE, &t));
        for (int i = 0; i < 3; i++) {
            expect_attended_alike(&t, 4, room[i]);
            expect_attended_alike(&t, 20, room[i]);
        }
        end_twin(&t);
    }
}

/* ---- Two contexts at once ----------------------------------------------------------------------- */

typedef struct engine {
    twin t;
    csa_context *context;
    cudaStream_t stream;
    int failures;
} engine;

static void *serve(void *argument)
{
    engine *e = argument;
    csa_step_args step = world_step(&e->t.device);
    step.stream = e->stream;
    for (int i = 0; i < 100; i++)
        e->failures += csa_decode(e->context, &step) != CSA_OK;
    e->failures += cudaStreamSynchronize(e->stream) != cudaSuccess;
    return NULL;
}

static void contexts_share_a_device(void **state)
{
    (void)state;
    if (getenv("CSA_TEST_ONE_HOST_THREAD")) {
        print_message("skipped: CSA_TEST_ONE_HOST_THREAD is set\n");
        skip();
    }
    engine engines[2];
    uint8_t *expected[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        engine *e = &engines[i];
        make_twin(&e->t, (world_shape){.requests = 3 + 9 * i, .heads = 8, .exact_length = 700, .topk = 80},
                  (uint64_t)(74 + i));
        CHECK_OK(queue(DECODE, &e->t));
        to_host(&e->t);
        expected[i] = arena_snapshot(&e->t.host.memory);
        e->context = cuda_context((csa_context_options){0});
        e->failures = 0;
        CHECK_CUDA(cudaStreamCreateWithFlags(&e->stream, cudaStreamNonBlocking));
    }
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, serve, &engines[i]) == 0);
    for (int i = 0; i < 2; i++) {
        engine *e = &engines[i];
        pthread_join(threads[i], NULL);
        CHECKF(e->failures == 0, "%d of 101 calls", e->failures);
        to_host(&e->t);
        CHECKF(arena_unchanged(&e->t.host.memory, expected[i]), "context %d", i);
        free(expected[i]);
        CHECK_CUDA(cudaStreamDestroy(e->stream));
        csa_context_destroy(e->context);
        end_twin(&e->t);
    }
}

/* ---- Many rows ---------------------------------------------------------------------------------- */

enum { MANY = 70000 }; /* more than a grid's y and z may have */

static csa_tensor repeated(csa_tensor t)
{
    t.shape[0] = MANY;
    t.stride[0] = 0;
    return t;
}

/* MANY times the rows of an output without gaps. */
static csa_tensor many_of(csa_tensor t)
{
    size_t bytes = (size_t)(tensor_count(&t) * tensor_itemsize(t.dtype)) * MANY;
    t.shape[0] *= MANY;
    t.data = allocate(bytes);
    CHECK_CUDA(cudaMemset(t.data, 0xFF, bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
    return t;
}

/* Every piece is what a call for one token wrote; frees it. */
static void expect_all_equal(const char *name, csa_tensor many, const csa_tensor *one)
{
    size_t bytes = (size_t)(tensor_count(one) * tensor_itemsize(one->dtype));
    uint8_t *got = malloc(MANY * bytes), *expected = malloc(bytes);
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(got, many.data, MANY * bytes, cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(expected, one->data, bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < MANY; i++)
        CHECKF(memcmp(got + i * bytes, expected, bytes) == 0, "%s of token %zu", name, i);
    free(got);
    free(expected);
    CHECK_CUDA(cudaFree(many.data));
}

static csa_tokens repeated_tokens(const twin *t)
{
    csa_tokens k = t->device.step;
    k.block_table = repeated(k.block_table);
    k.positions = repeated(k.positions);
    k.slots.ndim = k.ring_base.ndim = 0;
    return k;
}

static void decode_takes_many_rows(void **state)
{
    (void)state;
    skip_if_quick();
    twin t;
    make_twin(&t, (world_shape){.exact_length = 300, .groups = 2, .heads = 4}, 76);
    CHECK_OK(queue(DECODE, &t));
    csa_tokens tokens = repeated_tokens(&t);
    csa_step_args step = world_step(&t.device);
    csa_tensor *inputs[] = {&step.index_query, &step.index_weights, &step.query, &step.gate};
    for (int i = 0; i < 4; i++)
        *inputs[i] = repeated(*inputs[i]);
    step.tokens = &tokens;
    step.rows_out = NULL;
    step.out = many_of(step.out);
    step.lse = many_of(step.lse);
    step.selected = many_of(step.selected);
    step.stream = stream;
    csa_serving serving = world_serving(&t.host);
    serving.decode_tokens = MANY;
    step.workspace = make_workspace(&serving);
    CHECK_OK(csa_decode(context, &step));
    expect_all_equal("out", step.out, &t.device.out);
    expect_all_equal("lse", step.lse, &t.device.lse);
    expect_all_equal("selected", step.selected, &t.device.selected);
    CHECK_CUDA(cudaFree(step.workspace.data));
    end_twin(&t);
}

static void stages_take_many_rows(void **state)
{
    (void)state;
    skip_if_quick();
    twin t;
    make_twin(&t, (world_shape){.exact_length = 300, .groups = 2, .heads = 4}, 77);
    world *w = &t.device;
    csa_tokens tokens = repeated_tokens(&t);
    csa_score_args score = world_score(w), scores = score;
    csa_select_args select = world_select(w), selects;
    csa_attend_args attend = world_attend(w), attends = attend;
    score.stream = scores.stream = select.stream = attend.stream = attends.stream = stream;
    CHECK_OK(csa_score(context, &score));
    CHECK_OK(csa_select(context, &select));
    CHECK_OK(csa_attend(context, &attend));
    scores.tokens = attends.tokens = &tokens;
    scores.query = repeated(score.query);
    scores.weights = repeated(score.weights);
    csa_rows rows = {.size = sizeof rows, .current = many_of(w->rows_out.current)};
    scores.rows_out = &rows;
    scores.scores = many_of(score.scores);
    CHECK_OK(csa_score(context, &scores));
    selects = select;
    selects.scores = scores.scores;
    selects.current = rows.current;
    selects.selected = many_of(select.selected);
    CHECK_OK(csa_select(context, &selects));
    attends.query = repeated(attend.query);
    attends.gate = repeated(attend.gate);
    attends.selected = selects.selected;
    attends.out = many_of(attend.out);
    attends.lse = many_of(attend.lse);
    CHECK_OK(csa_attend(context, &attends));
    CHECK_CUDA(cudaFree(scores.scores.data)); /* entries past a row's length are unspecified */
    expect_all_equal("current", rows.current, &w->rows_out.current);
    expect_all_equal("selected", selects.selected, &w->selected);
    expect_all_equal("out", attends.out, &w->out);
    expect_all_equal("lse", attends.lse, &w->lse);
    end_twin(&t);
}

static void prepare_takes_many_tokens(void **state)
{
    (void)state;
    skip_if_quick();
    twin t;
    make_twin(&t, (world_shape){.exact_length = 100, .heads = 2}, 78);
    csa_prepare_args one = t.device.prepare, many = one;
    csa_tokens tokens = repeated_tokens(&t);
    csa_tensor *inputs[] = {&many.index_query, &many.index_key, &many.index_weights,
                            &many.query,       &many.key,       &many.value};
    csa_tensor *outputs[] = {&many.index_query_out, &many.index_key_out, &many.index_weights_out,
                             &many.query_out,       &many.key_out,       &many.value_out};
    const csa_tensor *expected[] = {&one.index_query_out, &one.index_key_out, &one.index_weights_out,
                                    &one.query_out,       &one.key_out,       &one.value_out};
    for (int i = 0; i < 6; i++) {
        *inputs[i] = repeated(*inputs[i]);
        *outputs[i] = many_of(*outputs[i]);
    }
    one.cache = many.cache = NULL;
    many.tokens = &tokens;
    CHECK_OK(csa_prepare(context, &one));
    CHECK_OK(csa_prepare(context, &many));
    for (int i = 0; i < 6; i++)
        expect_all_equal("an output of prepare", *outputs[i], expected[i]);
    end_twin(&t);
}

/* ---- Far blocks --------------------------------------------------------------------------------- */

/* Copies a cache's blocks between two views. */
static void copy_blocks(csa_tensor to, csa_tensor from)
{
    for (int64_t block = 0; block < to.shape[0]; block++) {
        csa_tensor a = tensor_slice(to, block, 1), b = tensor_slice(from, block, 1);
        CHECK_CUDA(cudaMemcpy(a.data, b.data, (size_t)(tensor_count(&a) * tensor_itemsize(a.dtype)),
                              cudaMemcpyDeviceToDevice));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
}

static int64_t block_bytes(const csa_tensor *t)
{
    return tensor_count(t) / t->shape[0] * tensor_itemsize(t->dtype);
}

/* The cache's blocks, each with its summaries, `stride` bytes apart. */
static csa_cache make_far(const csa_cache *near, char *memory, int64_t stride)
{
    csa_cache far = *near;
    far.kv.data = memory;
    far.kv.stride[0] = stride / tensor_itemsize(far.kv.dtype);
    far.summaries.data = memory + block_bytes(&near->kv);
    far.summaries.stride[0] = stride;
    copy_blocks(far.kv, near->kv);
    copy_blocks(far.summaries, near->summaries);
    return far;
}

static void blocks_may_lie_far_apart(void **state)
{
    (void)state;
    skip_if_quick();
    const int64_t stride = ((int64_t)1 << 31) + 4096;
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        world_shape shape = {.requests = 2, .groups = 2, .heads = 3, .exact_length = 45, .query_len = 2};
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        twin a, b;
        make_twin(&a, shape, 79);
        make_twin(&b, shape, 79);
        csa_cache near = b.device.cache;
        size_t free_bytes, all, needed = (size_t)(stride * near.kv.shape[0]);
        CHECK_CUDA(cudaMemGetInfo(&free_bytes, &all));
        if (free_bytes < needed) {
            print_message("skipped: %zu bytes of device memory are free, %zu are needed\n", free_bytes, needed);
            end_twin(&a);
            end_twin(&b);
            skip();
        }
        char *memory = allocate(needed);
        b.device.cache = make_far(&near, memory, stride);
        CHECK_OK(queue(LAYER, &a));
        CHECK_OK(queue(LAYER, &b));
        CHECK_CUDA(cudaDeviceSynchronize());
        copy_blocks(near.kv, b.device.cache.kv);
        copy_blocks(near.summaries, b.device.cache.summaries);
        CHECK_CUDA(cudaFree(memory));
        to_host(&a);
        to_host(&b);
        arena_expect_equal(&b.host.memory, &a.host.memory, NULL);
        end_twin(&a);
        end_twin(&b);
    }
}

/* ---- Against ref -------------------------------------------------------------------------------- */

/* Sums of other orders: within `relative` of each value, or of what one summand could be. */
static void expect_near(const char *name, const csa_tensor *got, const csa_tensor *expected, double relative)
{
    const int64_t *n = got->shape;
    CHECK(tensor_count(got) == tensor_count(expected));
    for (int64_t at = 0, count = tensor_count(got); at < count; at++) {
        int64_t index[4] = {0}, left = at;
        for (int d = got->ndim - 1; d >= 0; left /= n[d], d--)
            index[d] = left % n[d];
        double x = tensor_value(got, index[0], index[1], index[2], index[3]),
               y = tensor_value(expected, index[0], index[1], index[2], index[3]);
        CHECKF(x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= relative * (fabs(y) + 0.02),
               "%s [%d, %d, %d, %d] is %.9g, expected %.9g", name, (int)index[0], (int)index[1], (int)index[2],
               (int)index[3], x, y);
    }
}

/* Within a hundredth of each head's length. */
static void expect_heads_near(const csa_tensor *got, const csa_tensor *expected)
{
    int64_t groups = got->shape[1], heads = got->shape[2], count = got->shape[0] * groups * heads;
    for (int64_t i = 0; i < count; i++) {
        int64_t t = i / heads / groups, g = i / heads % groups, h = i % heads;
        double error = 0, length = 0;
        for (int64_t d = 0; d < CSA_HEAD_SIZE; d++) {
            double x = tensor_value(got, t, g, h, d), y = tensor_value(expected, t, g, h, d);
            error += (x - y) * (x - y);
            length += y * y;
        }
        CHECKF(error <= 1e-4 * length, "out of token %d, group %d, head %d: %g of %g", (int)t, (int)g, (int)h,
               sqrt(error), sqrt(length));
    }
}

/* The scores that count. */
static void expect_scores_near(const world *got, const world *expected)
{
    for (int64_t row = 0; row < got->rows; row++) {
        csa_tensor x = tensor_slice(got->scores, row, 1), y = tensor_slice(expected->scores, row, 1);
        x.shape[1] = y.shape[1] = (int64_t)tensor_value(&expected->rows_out.lengths, row, 0, 0, 0);
        expect_near("scores", &x, &y, 1e-4);
    }
}

/* Each stage of a layer against ref on what the stage was given: its inputs may differ in their last bits. */
static void expect_stages_agree(csa_context *ref, world *got, world *expected)
{
    csa_prepare_args prepare = expected->prepare;
    csa_score_args score = world_score(got);
    csa_select_args select = world_select(got);
    csa_attend_args attend = world_attend(got);
    score.query = got->prepare.index_query_out;
    score.weights = got->prepare.index_weights_out;
    score.scores = expected->scores;
    score.rows_out = &expected->rows_out;
    select.selected = expected->selected;
    attend.query = got->prepare.query_out;
    attend.out = expected->out;
    attend.lse = expected->lse;
    CHECK_OK(csa_prepare(ref, &prepare));
    CHECK_OK(csa_score(ref, &score));
    CHECK_OK(csa_select(ref, &select));
    CHECK_OK(csa_attend(ref, &attend));
    expect_near("index_query_out", &got->prepare.index_query_out, &prepare.index_query_out, 0.13);
    expect_near("index_key_out", &got->prepare.index_key_out, &prepare.index_key_out, 0.01);
    expect_near("index_weights_out", &got->prepare.index_weights_out, &prepare.index_weights_out, 0);
    expect_near("query_out", &got->prepare.query_out, &prepare.query_out, 0.01);
    expect_near("kv", &got->cache.kv, &expected->cache.kv, got->cache.kv.dtype == CSA_BF16 ? 0.01 : 0.13);
    tensor_expect_equal("rows.active", &got->rows_out.active, &expected->rows_out.active);
    tensor_expect_equal("rows.current", &got->rows_out.current, &expected->rows_out.current);
    expect_scores_near(got, expected);
    tensor_expect_equal("selected", &got->selected, &expected->selected);
    expect_heads_near(&got->out, &expected->out);
    expect_near("lse", &got->lse, &expected->lse, 1e-3);
}

static world_shape draw_shape(test_random *r)
{
    return (world_shape){
        .groups = RANDOM_OF(r, 1, 2, 8),
        .heads = (int32_t)random_between(r, 1, 16),
        .index_heads = RANDOM_OF(r, 2, 4),
        .block_size = RANDOM_OF(r, 16, 32, 64, 128),
        .topk = RANDOM_OF(r, 1, 7, 64, 512),
        .requests = (int32_t)random_between(r, 1, 5),
        .query_len = RANDOM_OF(r, 1, 2, 4),
        .kv_dtype = random_chance(r, 50) ? CSA_BF16 : CSA_E4M3,
        .max_length = random_between(r, 8, 1200),
        .rotary = RANDOM_OF(r, -1, 64, 192),
        .strided = random_chance(r, 50),
        .inactive = random_chance(r, 50),
    };
}

static void layers_agree_with_ref(void **state)
{
    (void)state;
    csa_context *ref = test_context((csa_context_options){.backend = CSA_BACKEND_REF});
    for (int draw = 0; draw < test_draws(40); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 80);
        world_shape shape = draw_shape(&r);
        twin t;
        world expected;
        make_twin(&t, shape, (uint64_t)draw);
        world_make(&expected, shape, (uint64_t)draw);
        csa_score_args score = world_score(&t.device);
        score.query = t.device.prepare.index_query_out;
        score.weights = t.device.prepare.index_weights_out;
        score.rows_out = NULL;
        score.stream = stream;
        CHECK_OK(queue(LAYER, &t));
        CHECK_OK(csa_score(context, &score)); /* the layer's own, which it does not show */
        to_host(&t);
        expect_stages_agree(ref, &t.host, &expected);
        world_end(&expected);
        end_twin(&t);
    }
    csa_context_destroy(ref);
}

/* ---- Long rows ---------------------------------------------------------------------------------- */

enum { SCORE_SORTS = 6 };

/* Scores of all magnitudes; few values; one; hardly any but NaN; half of them 0; a large and a small one beside
 * each other, here and there. */
static float draw_score(test_random *r, int sort, int64_t at)
{
    float x = (float)random_normal(r);
    switch (sort) {
    case 0:
        return random_chance(r, 80) ? x : x * 1e20F;
    case 1:
        return (float)random_between(r, 0, 2);
    case 2:
        return -1.5F;
    case 3:
        return random_chance(r, 1) ? x : NAN;
    case 5:
        if (at >= 513 * 32 || (at % 64 != 31 && at % 64 != 32))
            return x - 50;
        return (at % 64 == 31 ? 100.0F : 2.0F) + (at < 128 ? 0.0F : 1e-4F * (float)at);
    default:
        return x > 0 ? x : 0;
    }
}

static void *to_new_memory(const void *from, size_t bytes)
{
    void *memory = allocate(bytes);
    CHECK_CUDA(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice));
    return memory;
}

static void expect_selection(csa_context *ref, int64_t regions, int64_t topk, int sort)
{
    enum { ROWS = 3 };
    test_random r = random_of((uint64_t)(regions * 8 + sort), (uint64_t)topk);
    size_t score_bytes = (size_t)(ROWS * regions) * sizeof(float),
           bytes = (size_t)(ROWS * (topk + 1)) * sizeof(int64_t);
    float *scores = malloc(score_bytes);
    int64_t *expected = malloc(bytes), *got = malloc(bytes), current[ROWS];
    for (int64_t i = 0; i < ROWS * regions; i++)
        scores[i] = draw_score(&r, sort, i % regions);
    for (int row = 0; row < ROWS; row++)
        current[row] = row == 0 ? regions - 1 : random_between(&r, topk, regions - 1);
    csa_select_args args = {
        .size = sizeof args,
        .scores = csa_tensor_2d(scores, CSA_F32, ROWS, regions),
        .current = csa_tensor_1d(current, CSA_I64, ROWS),
        .selected = csa_tensor_2d(expected, CSA_I64, ROWS, topk + 1),
        .topk = topk,
    };
    CHECK_OK(csa_select(ref, &args));
    args.scores.data = to_new_memory(scores, score_bytes);
    args.current.data = to_new_memory(current, sizeof current);
    args.selected.data = allocate(bytes);
    args.stream = stream;
    CHECK_OK(csa_select(context, &args));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_CUDA(cudaMemcpy(got, args.selected.data, bytes, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < ROWS * (topk + 1); i++)
        CHECKF(got[i] == expected[i], "%d regions, topk %d, sort %d: entry %d is %d, expected %d", (int)regions,
               (int)topk, sort, (int)i, (int)got[i], (int)expected[i]);
    CHECK_CUDA(cudaFree(args.scores.data));
    CHECK_CUDA(cudaFree(args.current.data));
    CHECK_CUDA(cudaFree(args.selected.data));
    free(scores);
    free(expected);
    free(got);
}

/* Past 8192 regions, peaks are searched first; past 131,072, peaks of more than eight. */
static void long_rows_are_selected(void **state)
{
    (void)state;
    const int64_t lengths[] = {8193, 40001, 150000, 300000};
    csa_context *ref = test_context((csa_context_options){.backend = CSA_BACKEND_REF});
    for (int i = 0; i < (test_quick() ? 1 : 4); i++)
        for (int sort = 0; sort < SCORE_SORTS; sort += test_quick() ? 4 : 1) {
            expect_selection(ref, lengths[i], 512, sort);
            if (test_quick())
                continue;
            expect_selection(ref, lengths[i], 1, sort);
            expect_selection(ref, lengths[i], 1024, sort);
        }
    csa_context_destroy(ref);
}

/* In a step, score finds the peaks. */
static void long_steps_select_like_stages(void **state)
{
    (void)state;
    skip_if_quick();
    twin t;
    make_twin(&t,
              (world_shape){.exact_length = 72000,
                            .requests = 2,
                            .query_len = 2,
                            .topk = 512,
                            .block_size = 128,
                            .kv_dtype = CSA_E4M3},
              79);
    csa_score_args score = world_score(&t.device);
    csa_select_args select = world_select(&t.device);
    CHECK_OK(queue(DECODE, &t));
    to_host(&t);
    csa_tensor selected = t.host.selected;
    selected.data = malloc((size_t)(tensor_count(&selected) * 8));
    memcpy(selected.data, t.host.selected.data, (size_t)(tensor_count(&selected) * 8));
    score.stream = select.stream = stream;
    CHECK_OK(csa_score(context, &score));
    CHECK_OK(csa_select(context, &select));
    to_host(&t);
    tensor_expect_equal("selected", &selected, &t.host.selected);
    free(selected.data);
    end_twin(&t);
}

/* ---- Contexts ----------------------------------------------------------------------------------- */

static void bad_ids_are_named(void **state)
{
    (void)state;
    csa_context *plain = context, *checking = cuda_context((csa_context_options){.check = true});
    twin t;
    make_twin(&t, (world_shape){.requests = 2, .exact_length = 40}, 81);
    context = checking;
    CHECK_OK(queue(LAYER, &t));
    to_host(&t);
    *(int32_t *)tensor_at(&t.host.step.block_table, 1, 2, 0, 0) = 1000;
    to_device(&t);
    uint8_t *before = arena_snapshot(&t.host.memory);
    CHECK(queue(DECODE, &t) == CSA_ERROR_ID);
    CHECKF(strstr(test_error(), "tokens.block_table[1, 2] is 1000"), "%s", test_error());
    to_host(&t);
    CHECK(arena_unchanged(&t.host.memory, before));
    context = plain;
    free(before);
    end_twin(&t);
    csa_context_destroy(checking);
}

static void expect_refused(csa_context_options options, const char *text)
{
    csa_context *none = context;
    options.size = sizeof options;
    options.backend = CSA_BACKEND_CUDA;
    CHECK(csa_context_create(&options, &none) == CSA_ERROR_UNSUPPORTED && !none);
    CHECKF(strstr(test_error(), text), "%s", test_error());
}

static void what_is_not_there_is_refused(void **state)
{
    (void)state;
    char line[256];
    expect_refused((csa_context_options){.device = 9999}, "device is 9999");
    expect_refused((csa_context_options){.device = -1}, "device is -1");
    expect_refused((csa_context_options){.tier = "avx2"}, "tier avx2 is unknown");
    CHECK_OK(csa_device_describe(CSA_BACKEND_CUDA, 0, line, sizeof line));
    CHECKF(strstr(line, "multiprocessors"), "%s", line);
    CHECK(csa_device_describe(CSA_BACKEND_CUDA, 9999, line, sizeof line) == CSA_ERROR_ARGUMENT);
}

int main(void)
{
    char text[256];
    tier = getenv("CSA_TEST_TIER") ? strdup(getenv("CSA_TEST_TIER")) : NULL;
    unsetenv("CSA_TEST_TIER"); /* what support_world.c makes is on the host here */
    unsetenv("CSA_TEST_BACKEND");
    if (csa_backend_describe(CSA_BACKEND_CUDA, text, sizeof text) != CSA_OK) {
        print_message("skipped: no back end cuda here: %s\n", text);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_agree_with_ref),
        cmocka_unit_test(graphs_replay_other_lengths),
        cmocka_unit_test(steps_repeat_themselves),
        cmocka_unit_test(batch_mates_change_nothing),
        cmocka_unit_test(cuts_change_nothing),
        cmocka_unit_test(contexts_share_a_device),
        cmocka_unit_test(decode_takes_many_rows),
        cmocka_unit_test(stages_take_many_rows),
        cmocka_unit_test(prepare_takes_many_tokens),
        cmocka_unit_test(blocks_may_lie_far_apart),
        cmocka_unit_test(bad_ids_are_named),
        cmocka_unit_test(long_rows_are_selected),
        cmocka_unit_test(long_steps_select_like_stages),
        cmocka_unit_test(what_is_not_there_is_refused),
    };
    test_seed();
    return cmocka_run_group_tests(tests, start, end);
}
