/*
 * Whole steps, plans, workspace sizes and questions: checks, then dispatch.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "api.h"
#include "check.h"
#include "cuda/module.h"
#include "fetch.h"
#include "format.h"
#include "step.h"
#include "tokens.h"

#include <stdlib.h>
#include <string.h>

static const int64_t max_regions = (int64_t)1 << 36; /* of one request: half a tera-token */

/* ---- Score + select + attend + gate ------------------------------------------------------------- */

/* What a step and a plan must agree on; fills in regions and topk. */
static void settle_choice(csa_checker *c, const csa_plan *plan, const csa_nested *n, int64_t *regions,
                          int32_t *topk)
{
    if (c->status != CSA_OK)
        return;
    int64_t block_regions = csa_present(&n->cache.kv) ? n->cache.kv.shape[2] / CSA_REGION : 0;
    if (plan && *regions != 0 && *regions != plan->shape.regions)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "regions is %lld, expected the plan's %lld (or 0)",
                   (long long)*regions, (long long)plan->shape.regions);
    if (plan && *topk != 0 && *topk != plan->shape.topk)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "topk is %d, expected the plan's %lld (or 0)", (int)*topk,
                   (long long)plan->shape.topk);
    if (*regions == 0)
        *regions = plan ? plan->shape.regions : n->tokens.block_table.shape[1] * block_regions;
    if (*topk == 0 && plan)
        *topk = (int32_t)plan->shape.topk;
    *topk = csa_check_topk(c, *topk);
    csa_check_range(c, "regions", *regions, 0, max_regions);
}

static void check_plan(csa_checker *c, const csa_context *context, const csa_plan *plan, const csa_dim *tokens,
                       const csa_dim *groups)
{
    if (c->status != CSA_OK || !plan)
        return;
    if (plan->context != context)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "the plan was made with another context");
    if (tokens && tokens->extent != plan->shape.tokens)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%lld tokens (from %s), but the plan has %lld",
                   (long long)tokens->extent, tokens->source, (long long)plan->shape.tokens);
    if (groups->extent != plan->shape.groups)
        csa_refuse(c, CSA_ERROR_ARGUMENT, "%lld KV groups (from %s), but the plan has %lld",
                   (long long)groups->extent, groups->source, (long long)plan->shape.groups);
}

static void check_selected(csa_checker *c, csa_tensor *selected, const csa_step_shape *shape,
                           const csa_dim *tokens, const csa_dim *groups)
{
    csa_dim rows = csa_rows_dim(tokens, groups);
    csa_dim columns = CSA_KNOWN_DIM("columns", csa_list_columns(shape), "min(topk, regions) + 1");
    csa_check_tensor(c, "selected", selected, CSA_ARG_OUT | CSA_ARG_OPTIONAL, CSA_I64, 2, &rows, &columns);
}

void csa_check_step(csa_checker *c, const csa_context *context, const csa_plan *plan, const csa_step_args *from,
                    csa_step_call *to)
{
    csa_step_args *a = &to->args;
    csa_dim tokens = CSA_DIM("tokens"), groups = CSA_DIM("KV groups");
    csa_take(c, a, from, sizeof *a, "csa_step_args");
    csa_check_index(c, &a->index_query, &a->index_weights, &tokens, &groups);
    csa_check_attention(c, &a->query, &a->gate, &a->out, &a->lse, &tokens, &groups);
    csa_check_tokens(c, a->tokens, CSA_NEED_TABLE | CSA_NEED_POSITIONS, &tokens, &to->nested.tokens);
    csa_check_cache(c, a->cache, CSA_NEED_KV | CSA_NEED_SUMMARIES, &groups, &to->nested.cache);
    csa_check_rows(c, a->rows_out, CSA_ARG_OUT, &tokens, &groups, &to->nested.rows);
    check_plan(c, context, plan, &tokens, &groups);
    settle_choice(c, plan, &to->nested, &a->regions, &a->topk);
    if (c->status != CSA_OK)
        return;
    csa_step_shape shape = csa_shape_of(context, tokens.extent, groups.extent, a->regions, a->topk);
    check_selected(c, &a->selected, &shape, &tokens, &groups);
    csa_check_workspace(c, a->workspace, csa_step_bytes(&shape));
    a->tokens = &to->nested.tokens;
    a->cache = &to->nested.cache;
    a->rows_out = a->rows_out ? &to->nested.rows : NULL;
}

/* No true position may lie past its chunk's bound. */
static void check_bounds(csa_checker *c, const csa_plan *plan, const csa_tokens *tokens)
{
    for (int64_t token = 0; plan && token < plan->shape.tokens && c->status == CSA_OK; token++) {
        int64_t position = csa_token_position(tokens, token),
                regions = plan->chunk_regions[token / plan->chunk_tokens];
        if (csa_token_active(tokens, token) && position / CSA_REGION >= regions)
            csa_refuse(c, CSA_ERROR_ID, "token %lld stands at %lld, past the plan's bound of %lld regions",
                       (long long)token, (long long)position, (long long)regions);
    }
}

static void check_step_ids(csa_checker *c, const csa_plan *plan, const csa_step_args *a)
{
    csa_check_seen_ids(c, a->tokens, &a->cache->kv, a->query.shape[0], a->regions);
    check_bounds(c, plan, a->tokens);
}

static csa_status run_step(const csa_context *context, const char *name, const csa_plan *plan,
                           const csa_step_args *args)
{
    csa_step_call call;
    csa_checker c = csa_begin(context, name);
    csa_check_step(&c, context, plan, args, &call);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, call.args.stream)) {
        csa_fetch_tokens(&ids, &call.nested.tokens);
        check_step_ids(&c, plan, &call.args);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->step(context, plan, &call.args) : c.status;
}

csa_status csa_decode(const csa_context *context, const csa_step_args *args)
{
    return run_step(context, "csa_decode", NULL, args);
}

csa_status csa_prefill(const csa_context *context, const csa_plan *plan, const csa_step_args *args)
{
    if (!plan)
        return csa_fail(CSA_ERROR_ARGUMENT, "csa_prefill: plan is NULL");
    return run_step(context, "csa_prefill", plan, args);
}

/* ---- Plans -------------------------------------------------------------------------------------- */

static void check_plan_args(csa_checker *c, const csa_plan_args *from, csa_plan_args *a)
{
    csa_take(c, a, from, sizeof *a, "csa_plan_args");
    a->groups = a->groups ? a->groups : 1;
    a->topk = csa_check_topk(c, a->topk);
    csa_check_range(c, "groups", a->groups, 1, CSA_MAX_GROUPS);
    csa_check_range(c, "tokens", a->tokens, 0, INT32_MAX);
    csa_check_range(c, "requests", a->requests, 0, INT32_MAX);
    csa_check_range(c, "regions", a->regions, a->tokens > 0, max_regions);
}

/* A plan that can hold so many chunks; keeps an existing one's contents until they are replaced. */
static csa_plan *grow_plan(csa_plan *plan, int64_t chunks)
{
    if (plan && chunks <= plan->capacity)
        return plan;
    csa_plan *grown = plan ? plan : calloc(1, sizeof *grown);
    int64_t *chunk_regions =
        grown ? realloc(grown->chunk_regions, (size_t)chunks * sizeof *chunk_regions) : NULL;
    if (!chunk_regions) {
        if (!plan)
            free(grown);
        return NULL;
    }
    grown->chunk_regions = chunk_regions;
    grown->capacity = chunks;
    return grown;
}

csa_status csa_plan_prefill(const csa_context *context, const csa_plan_args *args, csa_plan **plan)
{
    csa_plan_args a;
    csa_checker c = csa_begin(context, "csa_plan_prefill");
    if (!plan)
        return csa_fail(CSA_ERROR_ARGUMENT, "csa_plan_prefill: plan is NULL");
    check_plan_args(&c, args, &a);
    if (c.status != CSA_OK)
        return c.status;
    csa_step_shape shape = csa_shape_of(context, a.tokens, a.groups, a.regions, a.topk);
    csa_plan *grown = grow_plan(*plan, a.tokens / csa_chunk_tokens(&shape) + 1);
    if (!grown)
        return csa_fail(CSA_ERROR_MEMORY, "csa_plan_prefill: out of memory");
    grown->context = context;
    csa_fill_plan(grown, &a, &shape);
    *plan = grown;
    return CSA_OK;
}

void csa_plan_destroy(csa_plan *plan)
{
    if (plan)
        free(plan->chunk_regions);
    free(plan);
}

/* ---- A whole layer ------------------------------------------------------------------------------ */

/* Prefill tokens and requests come first; each further request has query_len decode tokens. */
static void check_parts(csa_checker *c, const csa_plan *plan, const csa_tokens *k, int64_t tokens)
{
    int64_t requests = csa_token_requests(k);
    if (c->status != CSA_OK || !plan)
        return;
    if (!csa_present(&k->positions))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "tokens.positions is absent, needed with a plan");
    int64_t rest = tokens - plan->shape.tokens, further = requests - plan->requests;
    if (rest < 0 || further < 0 || rest % k->query_len || rest / k->query_len != further)
        csa_refuse(c, CSA_ERROR_ARGUMENT,
                   "%lld tokens of %lld requests, less the plan's %lld of %lld, are not query_len = %d tokens "
                   "for each "
                   "decode request",
                   (long long)tokens, (long long)requests, (long long)plan->shape.tokens,
                   (long long)plan->requests, (int)k->query_len);
}

static size_t layer_bytes(const csa_plan *plan, csa_step_shape shape)
{
    int64_t all = shape.tokens, prefill = plan ? plan->shape.tokens : 0;
    shape.tokens = prefill;
    size_t first = csa_step_bytes(&shape);
    shape.tokens = all - prefill;
    size_t second = csa_step_bytes(&shape);
    return first > second ? first : second;
}

void csa_check_layer(csa_checker *c, const csa_context *context, const csa_plan *plan,
                     const csa_layer_args *from, csa_layer_call *to)
{
    csa_layer_args *a = &to->args;
    csa_take(c, a, from, sizeof *a, "csa_layer_args");
    csa_check_prepare(c, a->prepare, &to->prepare);
    csa_prepare_args *p = &to->prepare.args;
    csa_nested *n = &to->prepare.nested;
    if (c->status == CSA_OK && (!csa_present(&p->query) || !p->cache))
        csa_refuse(c, CSA_ERROR_ARGUMENT, "prepare.query or prepare.cache is absent");
    if (c->status != CSA_OK)
        return;
    csa_dim tokens = CSA_KNOWN_DIM("tokens", p->query.shape[0], "prepare.query");
    csa_dim groups = CSA_KNOWN_DIM("KV groups", p->query.shape[1], "prepare.query");
    csa_dim planned = CSA_KNOWN_DIM("tokens", plan ? plan->shape.tokens : 0, "the plan");
    csa_dim columns = CSA_FIXED_DIM("metadata columns", CSA_RUN_COLUMNS, "10");
    csa_dim size = CSA_FIXED_DIM("index key size", CSA_SUMMARY_SIZE, "256");
    int needs = CSA_NEED_TABLE | CSA_NEED_SLOTS | CSA_NEED_POSITIONS | (plan ? CSA_NEED_QUERY_START : 0);
    csa_check_tokens(c, a->prepare->tokens, needs, &tokens, &n->tokens);
    csa_check_cache(c, a->prepare->cache, CSA_NEED_KV | CSA_NEED_SUMMARIES, &groups, &n->cache);
    csa_check_tensor(c, "z", &a->z, 0, CSA_BF16, 2, &tokens, &size);
    csa_check_tensor(c, "metadata", &a->metadata, CSA_ARG_OPTIONAL, CSA_I64, 2, &planned, &columns);
    csa_tensor query = p->query_out; /* what the step attends with */
    csa_check_attention(c, &query, &a->gate, &a->out, &a->lse, &tokens, &groups);
    csa_check_rows(c, a->rows_out, CSA_ARG_OUT, &tokens, &groups, &to->rows);
    csa_check_ring(c, n, n->tokens.query_len > 1 ? n->tokens.query_len : 0);
    check_plan(c, context, plan, NULL, &groups);
    check_parts(c, plan, &n->tokens, tokens.extent);
    settle_choice(c, plan, n, &a->regions, &a->topk);
    if (c->status != CSA_OK)
        return;
    csa_step_shape shape = csa_shape_of(context, tokens.extent, groups.extent, a->regions, a->topk);
    check_selected(c, &a->selected, &shape, &tokens, &groups);
    csa_check_workspace(c, a->workspace, layer_bytes(plan, shape));
    a->prepare = p;
    a->rows_out = a->rows_out ? &to->rows : NULL;
}

/* The ids of one part, as its summarize and step calls would check them. */
static void check_part_ids(csa_checker *c, csa_op op, const csa_tokens *tokens, const csa_layer_args *a,
                           int64_t count)
{
    csa_summarize_args summarize = {.tokens = tokens, .cache = a->prepare->cache};
    summarize.key.shape[0] = count;
    csa_check_summarize_ids(c, op, &summarize);
    csa_check_seen_ids(c, tokens, &a->prepare->cache->kv, count, a->regions);
}

static void check_layer_ids(csa_checker *c, const csa_plan *plan, const csa_layer_args *a)
{
    const csa_tokens *all = a->prepare->tokens;
    int64_t tokens = a->prepare->query.shape[0], prefill = plan ? plan->shape.tokens : 0;
    csa_check_prepare_ids(c, a->prepare);
    if (plan) {
        csa_tokens part = csa_prefill_part(all, plan);
        check_part_ids(c, CSA_OP_SUMMARIZE_PREFILL, &part, a, prefill);
        check_bounds(c, plan, &part);
    }
    csa_tokens part = csa_decode_part(all, plan, tokens);
    csa_op form = all->query_len > 1 ? CSA_OP_SUMMARIZE_VERIFY : CSA_OP_SUMMARIZE_DECODE;
    if (tokens > prefill)
        check_part_ids(c, form, &part, a, tokens - prefill);
}

csa_status csa_layer(const csa_context *context, const csa_plan *plan, const csa_layer_args *args)
{
    csa_layer_call call;
    csa_checker c = csa_begin(context, "csa_layer");
    csa_check_layer(&c, context, plan, args, &call);
    csa_fetched ids;
    if (csa_checking(&ids, &c, context, call.prepare.args.stream)) {
        csa_fetch_tokens(&ids, &call.prepare.nested.tokens);
        check_layer_ids(&c, plan, &call.args);
        csa_end_fetch(&ids);
    }
    return c.status == CSA_OK ? context->stages->layer(context, plan, &call.args) : c.status;
}

/* ---- Asking ------------------------------------------------------------------------------------- */

typedef union any_call {
    csa_prepare_call prepare;
    csa_summarize_call summarize;
    csa_score_call score;
    csa_select_args select;
    csa_attend_call attend;
    csa_gate_args gate;
    csa_step_call step;
    csa_layer_call layer;
} any_call;

csa_status csa_supported(const csa_context *context, csa_op op, const void *args)
{
    any_call call;
    csa_checker c = csa_begin(context, "csa_supported");
    memset(&call, 0, sizeof call);
    switch (op) {
    case CSA_OP_PREPARE:
        csa_check_prepare(&c, args, &call.prepare);
        break;
    case CSA_OP_SUMMARIZE_DECODE:
    case CSA_OP_SUMMARIZE_VERIFY:
    case CSA_OP_SUMMARIZE_PREFILL:
    case CSA_OP_SUMMARIZE_METADATA:
        csa_check_summarize(&c, op, args, &call.summarize);
        break;
    case CSA_OP_SCORE:
        csa_check_score(&c, args, &call.score);
        break;
    case CSA_OP_SELECT:
        csa_check_select(&c, args, &call.select);
        break;
    case CSA_OP_ATTEND:
        csa_check_attend(&c, args, &call.attend);
        break;
    case CSA_OP_GATE:
        csa_check_gate(&c, args, &call.gate);
        break;
    case CSA_OP_DECODE:
    case CSA_OP_PREFILL:
        csa_check_step(&c, context, NULL, args, &call.step);
        break;
    case CSA_OP_LAYER:
        csa_check_layer(&c, context, NULL, args, &call.layer);
        break;
    default:
        csa_refuse(&c, CSA_ERROR_ARGUMENT, "there is no operation %d", (int)op);
    }
    return c.status;
}

static void check_serving(csa_checker *c, const csa_serving *from, csa_serving *s)
{
    csa_take(c, s, from, sizeof *s, "csa_serving");
    s->groups = s->groups ? s->groups : 1;
    s->heads = s->heads ? s->heads : CSA_MAX_HEADS;
    s->index_heads = s->index_heads ? s->index_heads : CSA_INDEX_HEADS;
    s->block_size = s->block_size ? s->block_size : 64;
    s->topk = csa_check_topk(c, s->topk);
    csa_check_range(c, "regions", s->regions, s->decode_tokens > 0 || s->prefill_tokens > 0, max_regions);
    csa_check_range(c, "decode_tokens", s->decode_tokens, 0, INT32_MAX);
    csa_check_range(c, "prefill_tokens", s->prefill_tokens, 0, INT32_MAX);
    csa_check_range(c, "groups", s->groups, 1, CSA_MAX_GROUPS);
    csa_check_range(c, "heads", s->heads, 1, CSA_MAX_HEADS);
    if (s->index_heads != 16 && (s->index_heads < 1 || s->index_heads > 8))
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "index_heads is %d, supported: 1 to 8, 16", (int)s->index_heads);
    if (s->block_size != 16 && s->block_size != 32 && s->block_size != 64 && s->block_size != 128)
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "block_size is %d, supported: 16, 32, 64, 128",
                   (int)s->block_size);
    if (s->kv_dtype != 0 && s->kv_dtype != CSA_BF16 && s->kv_dtype != CSA_E4M3)
        csa_refuse(c, CSA_ERROR_UNSUPPORTED, "kv_dtype is 0x%x, supported: bf16, e4m3", (unsigned)s->kv_dtype);
}

static size_t serving_bytes(const csa_serving *s, csa_backend backend, size_t limit)
{
    csa_step_shape shape = {s->decode_tokens, s->groups, s->regions,
                            s->topk,          limit,     backend == CSA_BACKEND_CUDA};
    size_t decode = csa_step_bytes(&shape);
    shape.tokens = s->prefill_tokens;
    size_t prefill = csa_step_bytes(&shape);
    return decode > prefill ? decode : prefill;
}

csa_status csa_workspace_size(const csa_context_options *options, const csa_serving *serving, size_t *bytes)
{
    csa_checker c = {.call = "csa_workspace_size"};
    csa_context_options o;
    csa_serving s;
    if (!bytes)
        return csa_fail(CSA_ERROR_ARGUMENT, "csa_workspace_size: bytes is NULL");
    check_serving(&c, serving, &s);
    if (c.status == CSA_OK)
        c.status = csa_take_options(options, c.call, &o);
    if (c.status == CSA_OK)
        *bytes = serving_bytes(&s, o.backend, o.scratch_limit);
    return c.status;
}

static void nothing(void *data, int64_t index)
{
    (void)data;
    (void)index;
}

csa_status csa_warm_up(const csa_context *context, const csa_serving *serving, csa_workspace workspace)
{
    csa_serving s;
    csa_checker c = csa_begin(context, "csa_warm_up");
    check_serving(&c, serving, &s);
    if (c.status != CSA_OK)
        return c.status;
    size_t needed = serving_bytes(&s, context->backend, context->scratch_limit);
    csa_check_workspace(&c, workspace, needed);
    if (c.status != CSA_OK)
        return c.status;
    if (context->cuda)
        return context->cuda->warm_up(context, workspace.data, needed);
    if (needed)
        memset(workspace.data, 0, needed);
    return csa_parallel(context, context->threads, nothing, NULL);
}
