/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_twin.h"

void expect_cuda(int line, const char *what, cudaError_t error)
{
    if (error != cudaSuccess)
        test_fail(__FILE__, line, what, "%s", cudaGetErrorString(error));
}

csa_context *context;
cudaStream_t stream;
const char *tier;

csa_context *cuda_context(csa_context_options options)
{
    options.backend = CSA_BACKEND_CUDA;
    options.tier = tier;
    return test_context(options);
}

int start(void **state)
{
    (void)state;
    context = cuda_context((csa_context_options){0});
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return 0;
}

int end(void **state)
{
    (void)state;
    csa_context_destroy(context);
    CHECK_CUDA(cudaStreamDestroy(stream));
    return 0;
}

void *allocate(size_t bytes)
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

csa_workspace make_workspace(const csa_serving *serving)
{
    csa_context_options options = {.size = sizeof options, .backend = CSA_BACKEND_CUDA};
    csa_workspace w = {0};
    CHECK_OK(csa_workspace_size(&options, serving, &w.bytes));
    w.data = allocate(w.bytes);
    CHECK_OK(csa_warm_up(context, serving, w));
    return w;
}

void to_device(twin *t)
{
    int i = 0;
    for (const buffer *b = t->host.memory.first; b; b = b->next, i++)
        CHECK_CUDA(cudaMemcpy(t->memory[i], b->data, b->bytes, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaDeviceSynchronize());
}

void to_host(twin *t)
{
    int i = 0;
    CHECK_CUDA(cudaDeviceSynchronize());
    for (const buffer *b = t->host.memory.first; b; b = b->next, i++)
        CHECK_CUDA(cudaMemcpy(b->data, t->memory[i], b->bytes, cudaMemcpyDeviceToHost));
    arena_check(&t->host.memory);
}

void make_twin(twin *t, world_shape shape, uint64_t number)
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

void end_twin(twin *t)
{
    for (int i = 0; i < MOST_BUFFERS; i++)
        CHECK_CUDA(cudaFree(t->memory[i]));
    CHECK_CUDA(cudaFree(t->device.workspace.data));
    csa_plan_destroy(t->plan);
    world_end(&t->host);
}

void add_plan(twin *t)
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

csa_status queue(kind k, twin *t)
{
    csa_step_args step = world_step(&t->device);
    csa_layer_args layer = world_layer(&t->device);
    step.stream = stream;
    return k == DECODE ? csa_decode(context, &step) : csa_layer(context, t->plan, &layer);
}

void set_lengths(world *w, int percent)
{
    int64_t new = w->shape.query_len;
    for (int64_t t = 0; t < w->tokens; t++) {
        int64_t request = t / new, length = w->lengths[request] * percent / 100;
        int64_t position = (length > new ? length : new) - new + t % new;
        *(int64_t *)tensor_at(&w->step.positions, t, 0, 0, 0) = position;
        *(int64_t *)tensor_at(&w->step.slots, t, 0, 0, 0) = world_slot(w, request, position);
    }
}

void set_scales(world *w, float k, float v)
{
    memcpy((void *)(uintptr_t)w->cache.k_scale, &k, sizeof k);
    memcpy((void *)(uintptr_t)w->cache.v_scale, &v, sizeof v);
}

void spoil_workspace(const twin *t, int byte)
{
    CHECK_CUDA(cudaMemset(t->device.workspace.data, byte, t->device.workspace.bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
}
