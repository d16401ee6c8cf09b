/*
 * Arguments that cannot be right: each is refused, naming itself, its value and what would do, before anything
 * is written; csa_supported says the same in the same words. SPDX-License-Identifier: Apache-2.0
 */
#include "calls.h"

static csa_context *context;
static calls base;

static int make_calls(void **state)
{
    (void)state;
    context = test_context((csa_context_options){.threads = 2});
    calls_make(&base, context, (world_shape){.groups = 2, .heads = 3, .requests = 4, .exact_length = 60});
    return 0;
}

static int end_calls(void **state)
{
    (void)state;
    calls_end(&base);
    csa_context_destroy(context);
    return 0;
}

/* ---- One field at a time ------------------------------------------------------------------------ */

typedef struct change {
    size_t offset, size;
    int64_t value;
} change;

typedef struct mistake {
    int call;
    change first, second; /* size 0: none */
    csa_status status;
    const char *name, *text; /* both must be in the error */
} mistake;

#define SET(path, value)                                                       \
    {                                                                          \
        offsetof(calls, path), sizeof(((calls *)NULL)->path), (int64_t)(value) \
    }
#define NONE    \
    {           \
        0, 0, 0 \
    }
#define ARGUMENT(call, path, value, name, text)                      \
    {                                                                \
        call, SET(path, value), NONE, CSA_ERROR_ARGUMENT, name, text \
    }
#define UNSUPPORTED(call, path, value, name, text)                      \
    {                                                                   \
        call, SET(path, value), NONE, CSA_ERROR_UNSUPPORTED, name, text \
    }
#define ABSENT(call, path, name)             ARGUMENT(call, path.ndim, 0, name, "is absent")
#define NULL_DATA(call, path, name)          ARGUMENT(call, path.data, 0, name ":", "data is NULL")
#define DTYPE(call, path, wrong, name, text) ARGUMENT(call, path.dtype, wrong, name ": dtype is", text)
#define NDIM(call, path, wrong, name, text)  ARGUMENT(call, path.ndim, wrong, name ": ndim is", text)
#define LAST_STRIDE(call, path, last, name) \
    ARGUMENT(call, path.stride[last], 2, name ": stride", "is 2, expected 1")
#define OVERLAP(call, path, name) ARGUMENT(call, path.stride[0], 0, name ":", "elements of this output overlap")
#define EXTENT(call, path, dim, value, name, text)                                               \
    {                                                                                            \
        call, SET(path.shape[dim], value), NONE, CSA_ERROR_ARGUMENT, name ": extent " #dim, text \
    }
#define FIXED(call, path, dim, value, name, text)                                                   \
    {                                                                                               \
        call, SET(path.shape[dim], value), NONE, CSA_ERROR_UNSUPPORTED, name ": extent " #dim, text \
    }

enum { P = CSA_OP_PREPARE, SD, SV, SP, SM, SC, SE, AT, GA, DE, PR, LA, LP = CALL_LAYER_PLAN };

static const mistake mistakes[] = {
    /* prepare: every tensor is missed, and held to its dtype and shape */
    ABSENT(P, w.prepare.index_query, "index_query"),
    ABSENT(P, w.prepare.index_key, "index_key"),
    ABSENT(P, w.prepare.index_weights, "index_weights"),
    ABSENT(P, w.prepare.index_query_norm, "index_query_norm"),
    ABSENT(P, w.prepare.index_key_norm, "index_key_norm"),
    ABSENT(P, w.prepare.index_key_bias, "index_key_bias"),
    ABSENT(P, w.prepare.index_rope, "index_rope"),
    ABSENT(P, w.prepare.index_query_out, "index_query_out"),
    ABSENT(P, w.prepare.index_key_out, "index_key_out"),
    ABSENT(P, w.prepare.index_weights_out, "index_weights_out"),
    ABSENT(P, w.prepare.key, "key"),
    ABSENT(P, w.prepare.value, "value"),
    ABSENT(P, w.prepare.query_norm, "query_norm"),
    ABSENT(P, w.prepare.key_norm, "key_norm"),
    ABSENT(P, w.prepare.query_out, "query_out"),
    DTYPE(P, w.prepare.index_query, CSA_F32, "index_query", "fp32"),
    DTYPE(P, w.prepare.index_query_out, CSA_BF16, "index_query_out", "expected e4m3"),
    DTYPE(P, w.prepare.index_rope, CSA_I32, "index_rope", "int32"),
    DTYPE(P, w.prepare.rope, CSA_U8, "rope", "uint8"),
    DTYPE(P, w.prepare.query, 0x12345678, "query", "0x12345678"),
    DTYPE(P, w.prepare.value_out, CSA_I64, "value_out", "expected bf16"),
    NDIM(P, w.prepare.query, 3, "query", "is 3, expected 4"),
    NDIM(P, w.prepare.index_key, 5, "index_key", "is 5, expected 2"),
    NDIM(P, w.prepare.key, -1, "key", "is -1, expected 3"),
    FIXED(P, w.prepare.index_query, 3, 255, "index_query", "is 255, supported: 256"),
    FIXED(P, w.prepare.query, 3, 191, "query", "is 191, supported: 192"),
    FIXED(P, w.prepare.index_rope, 1, 64, "index_rope", "is 64, supported: 32"),
    FIXED(P, w.prepare.index_query_out, 2, 4, "index_query_out", "is 4, supported: 8"),
    EXTENT(P, w.prepare.index_key, 0, 5, "index_key", "is 5, expected 4 (from index_query)"),
    EXTENT(P, w.prepare.key, 1, 1, "key", "is 1, expected 2 (from index_query)"),
    EXTENT(P, w.prepare.query_out, 2, 2, "query_out", "is 2, expected 3 (from query)"),
    UNSUPPORTED(P, w.prepare.rope.shape[1], 63, "rope: rotary is 63", "even, 0 to 192"),
    UNSUPPORTED(P, w.prepare.rope.shape[1], 194, "rope: rotary is 194", "even, 0 to 192"),
    OVERLAP(P, w.prepare.query_out, "query_out"),
    LAST_STRIDE(P, w.prepare.query, 3, "query"),
    LAST_STRIDE(P, w.prepare.index_weights, 2, "index_weights"),
    NULL_DATA(P, w.prepare.query_norm, "query_norm"),
    NULL_DATA(P, w.prepare.key_out, "key_out"),
    ARGUMENT(P, w.prepare.tokens, 0, "csa_tokens", "NULL"),
    ABSENT(P, w.step.slots, "tokens.slots"),
    /* tokens */
    {P, SET(w.step.positions.ndim, 0), SET(w.step.seq_lens.ndim, 0), CSA_ERROR_ARGUMENT, "tokens.positions",
     "absent"},
    DTYPE(DE, w.step.block_table, CSA_I64, "tokens.block_table", "int64"),
    DTYPE(DE, w.step.positions, CSA_I32, "tokens.positions", "expected int64"),
    DTYPE(DE, w.step.seq_lens, CSA_I64, "tokens.seq_lens", "expected int32"),
    DTYPE(SP, w.step.query_start, CSA_I64, "tokens.query_start", "expected int32"),
    EXTENT(DE, w.step.slots, 0, 3, "tokens.slots", "is 3, expected 4"),
    EXTENT(DE, w.step.owners, 0, 9, "tokens.owners", "is 9, expected 4"),
    EXTENT(DE, w.step.ring_base, 0, 2, "tokens.ring_base", "is 2, expected 4 (from tokens.block_table)"),
    EXTENT(DE, w.step.query_start, 0, 4, "tokens.query_start", "is 4, expected 5"),
    UNSUPPORTED(DE, w.step.query_len, -1, "query_len", "is -1"),
    {DE, SET(w.step.owners.ndim, 0), SET(w.step.query_start.ndim, 0), CSA_OK, "", ""},
    ABSENT(DE, w.step.block_table, "tokens.block_table"),
    ABSENT(SC, w.step.block_table, "tokens.block_table"),
    ABSENT(AT, w.step.block_table, "tokens.block_table"),
    ABSENT(SD, w.step.slots, "tokens.slots"),
    ABSENT(SP, w.step.query_start, "tokens.query_start"),
    ABSENT(SM, w.step.query_start, "tokens.query_start"),
    ARGUMENT(SD, w.step.query_len, 2, "tokens.query_len is 2", "expected 1"),
    /* cache */
    ABSENT(AT, w.cache.kv, "cache.kv"),
    ABSENT(SC, w.cache.summaries, "cache.summaries"),
    ABSENT(DE, w.cache.summaries, "cache.summaries"),
    ABSENT(SD, w.cache.summaries, "cache.summaries"),
    ARGUMENT(SD, w.cache.ring.ndim, 0, "tokens.ring_base", "cache.ring is absent"),
    DTYPE(AT, w.cache.kv, CSA_F32, "cache.kv", "fp32"),
    DTYPE(SC, w.cache.summaries, CSA_BF16, "cache.summaries", "expected e4m3"),
    DTYPE(SD, w.cache.ring, CSA_F32, "cache.ring", "expected bf16"),
    FIXED(AT, w.cache.kv, 3, 383, "cache.kv", "is 383, supported: 384"),
    FIXED(SC, w.cache.summaries, 2, 128, "cache.summaries", "is 128, supported: 256"),
    FIXED(SD, w.cache.ring, 1, 511, "cache.ring", "is 511, supported: 512"),
    EXTENT(AT, w.cache.kv, 1, 1, "cache.kv", "is 1, expected 2"),
    EXTENT(SC, w.cache.summaries, 1, 1, "cache.summaries", "is 1, expected 2 (from cache.kv)"),
    EXTENT(SC, w.cache.summaries, 0, 1, "cache.summaries", "is 1, expected"),
    OVERLAP(AT, w.cache.kv, "cache.kv"),
    OVERLAP(SD, w.cache.ring, "cache.ring"),
    ARGUMENT(SD, w.cache.ring_capacity, 6, "cache.ring_capacity is 6", "at least 7"),
    ARGUMENT(SV, w.cache.ring_capacity, 7, "cache.ring_capacity is 7", "at least 8"),
    ARGUMENT(SP, w.cache.ring_capacity, 0, "cache.ring_capacity is 0", "at least 7"),
    ARGUMENT(SD, w.cache.ring_capacity, -1, "cache.ring_capacity is -1", "at least 7"),
    {AT, SET(w.cache.k_scale, 0x1001), NONE, CSA_ERROR_ARGUMENT, "k_scale", "not aligned"},
    {AT, SET(w.cache.v_scale, 0x1002), NONE, CSA_ERROR_ARGUMENT, "v_scale", "not aligned"},
    ARGUMENT(SC, score.cache, 0, "csa_cache", "NULL"),
    ARGUMENT(AT, attend.cache, 0, "csa_cache", "NULL"),
    /* summarize */
    ABSENT(SD, decode.key, "key"),
    ABSENT(SV, verify.z, "z"),
    ABSENT(SM, metadata.metadata, "metadata"),
    EXTENT(SD, decode.z, 0, 3, "z", "is 3, expected 4 (from key)"),
    FIXED(SP, chunk.key, 1, 192, "key", "is 192, supported: 256"),
    FIXED(SM, metadata.metadata, 1, 9, "metadata", "is 9, supported: 10"),
    /* score */
    ABSENT(SC, score.query, "query"),
    ABSENT(SC, score.weights, "weights"),
    ABSENT(SC, score.scores, "scores"),
    DTYPE(SC, score.query, CSA_BF16, "query", "expected e4m3"),
    DTYPE(SC, score.weights, CSA_BF16, "weights", "expected fp32"),
    FIXED(SC, score.query, 3, 192, "query", "is 192, supported: 256"),
    EXTENT(SC, score.weights, 2, 3, "weights", "is 3, expected 4"),
    EXTENT(SC, score.scores, 0, 4, "scores", "is 4, expected 8 (from tokens * groups)"),
    OVERLAP(SC, score.scores, "scores"),
    LAST_STRIDE(SC, score.scores, 1, "scores"),
    DTYPE(SC, w.rows_out.lengths, CSA_I64, "rows.lengths", "expected int32"),
    EXTENT(SC, w.rows_out.current, 0, 4, "rows.current", "is 4, expected 8"),
    OVERLAP(SC, w.rows_out.positions, "rows.positions"),
    /* select */
    ABSENT(SE, select.scores, "scores"),
    ABSENT(SE, select.current, "current"),
    ABSENT(SE, select.selected, "selected"),
    DTYPE(SE, select.current, CSA_I32, "current", "expected int64"),
    EXTENT(SE, select.selected, 1, 4, "selected", "is 4, expected 5 (from min(topk, regions) + 1)"),
    EXTENT(SE, select.current, 0, 7, "current", "is 7, expected 8 (from scores)"),
    UNSUPPORTED(SE, select.topk, -1, "topk is -1", "1 to 1024"),
    UNSUPPORTED(SE, select.topk, 1025, "topk is 1025", "1 to 1024"),
    NULL_DATA(SE, select.scores, "scores"),
    NULL_DATA(SE, select.selected, "selected"),
    OVERLAP(SE, select.selected, "selected"),
    /* attend */
    ABSENT(AT, attend.query, "query"),
    ABSENT(AT, attend.selected, "selected"),
    ABSENT(AT, attend.out, "out"),
    DTYPE(AT, attend.query, CSA_F32, "query", "expected bf16"),
    DTYPE(AT, attend.lse, CSA_BF16, "lse", "expected fp32"),
    DTYPE(AT, attend.gate, CSA_F32, "gate", "expected bf16"),
    FIXED(AT, attend.query, 3, 128, "query", "is 128, supported: 192"),
    EXTENT(AT, attend.out, 2, 2, "out", "is 2, expected 3 (from query)"),
    EXTENT(AT, attend.gate, 2, 2, "gate", "is 2, expected 3"),
    EXTENT(AT, attend.selected, 0, 4, "selected", "is 4, expected 8"),
    UNSUPPORTED(AT, attend.selected.shape[1], 1026, "selected", "is 1026"),
    UNSUPPORTED(AT, attend.selected.shape[1], 0, "selected", "is 0"),
    OVERLAP(AT, attend.out, "out"),
    OVERLAP(AT, attend.lse, "lse"),
    LAST_STRIDE(AT, attend.query, 3, "query"),
    {AT, SET(attend.workspace.bytes, 64), NONE, CSA_ERROR_ARGUMENT, "workspace.data", "NULL"},
    {AT, SET(attend.workspace.data, 0x1080), SET(attend.workspace.bytes, 64), CSA_ERROR_ARGUMENT,
     "workspace.data", "not aligned to 256 bytes"},
    ABSENT(AT, rows.active, "rows.active"),
    ABSENT(AT, rows.positions, "rows."),
    DTYPE(AT, rows.positions, CSA_I32, "rows.positions", "expected int64"),
    /* gate */
    ABSENT(GA, gate.attention, "attention"),
    ABSENT(GA, gate.gate, "gate"),
    ABSENT(GA, gate.out, "out"),
    DTYPE(GA, gate.active, CSA_I32, "active", "expected bool"),
    FIXED(GA, gate.attention, 2, 64, "attention", "is 64, supported: 192"),
    EXTENT(GA, gate.gate, 1, 5, "gate", "is 5, expected 6"),
    OVERLAP(GA, gate.out, "out"),
    /* steps */
    ABSENT(DE, step.index_query, "index"),
    ABSENT(DE, step.out, "out"),
    ABSENT(PR, step.query, "query"),
    EXTENT(DE, step.query, 1, 1, "query", "is 1, expected 2"),
    EXTENT(DE, step.selected, 1, 6, "selected", "is 6, expected 5"),
    UNSUPPORTED(DE, step.topk, 1025, "topk is 1025", "1 to 1024"),
    UNSUPPORTED(DE, step.regions, -1, "regions is -1", "0 to"),
    {DE, SET(step.workspace.bytes, 100), NONE, CSA_ERROR_WORKSPACE, "workspace has 100 bytes", "needs"},
    ARGUMENT(DE, step.workspace.data, 0, "workspace.data", "NULL"),
    ARGUMENT(DE, step.workspace.data, 0x1080, "workspace.data", "not aligned to 256 bytes"),
    ARGUMENT(DE, step.tokens, 0, "csa_tokens", "NULL"),
    /* layer */
    ARGUMENT(LA, layer.prepare, 0, "csa_prepare_args", "NULL"),
    ABSENT(LA, layer.z, "z"),
    ABSENT(LA, layer.out, "out"),
    {LA, SET(w.prepare.query.ndim, 0), NONE, CSA_ERROR_ARGUMENT, "prepare.query", "absent"},
    {LA, SET(w.prepare.cache, 0), NONE, CSA_ERROR_ARGUMENT, "prepare.cache", "absent"},
    ABSENT(LA, w.cache.summaries, "cache.summaries"),
    EXTENT(LA, layer.z, 0, 2, "z", "is 2, expected 4"),
    {LA, SET(layer.workspace.bytes, 1), NONE, CSA_ERROR_WORKSPACE, "workspace has 1 bytes", "needs"},
    ABSENT(LP, w.step.positions, "tokens.positions"),
    ABSENT(LP, w.step.query_start, "tokens.query_start"),
    /* absurd sizes and places */
    ARGUMENT(DE, step.query.shape[0], -1, "query", "is -1, expected 0 to"),
    ARGUMENT(SC, score.scores.shape[1], INT64_MAX, "scores", "is 9223372036854775807"),
    ARGUMENT(SC, score.scores.shape[1], INT64_MIN, "scores", "is -9223372036854775808"),
    ARGUMENT(SC, score.scores.stride[0], INT64_MAX, "scores", "reach beyond"),
    ARGUMENT(SC, score.scores.stride[0], INT64_MIN, "scores", "reach beyond"),
    ARGUMENT(AT, attend.query.stride[0], INT64_MAX / 2, "query", "reach beyond"),
    ARGUMENT(AT, w.cache.kv.stride[0], INT64_MIN, "cache.kv", "reach beyond"),
    ARGUMENT(AT, attend.query.data, 0x1001, "query", "not aligned to its 2-byte elements"),
    ARGUMENT(AT, attend.lse.data, 0x1002, "lse", "not aligned to its 4-byte elements"),
    ARGUMENT(AT, attend.selected.data, 0x1004, "selected", "not aligned to its 8-byte elements"),
    ARGUMENT(DE, w.step.positions.data, 0x1004, "tokens.positions", "not aligned to its 8-byte elements"),
    NULL_DATA(AT, w.cache.kv, "cache.kv"),
    NULL_DATA(SC, w.step.block_table, "tokens.block_table"),
    /* descriptors of a wrong size */
    ARGUMENT(P, w.prepare.size, 0, "csa_prepare_args.size is 0", "sizeof(csa_prepare_args)"),
    ARGUMENT(SD, decode.size, 7, "csa_summarize_args.size is 7", "sizeof"),
    ARGUMENT(SC, score.size, 70000, "csa_score_args.size is 70000", "sizeof"),
    ARGUMENT(SE, select.size, -1, "csa_select_args.size", "sizeof"),
    ARGUMENT(AT, attend.size, 0, "csa_attend_args.size", "sizeof"),
    ARGUMENT(GA, gate.size, 0, "csa_gate_args.size", "sizeof"),
    ARGUMENT(DE, step.size, 0, "csa_step_args.size", "sizeof"),
    ARGUMENT(LA, layer.size, 0, "csa_layer_args.size", "sizeof"),
    ARGUMENT(LA, w.prepare.size, 0, "csa_prepare_args.size", "sizeof"),
    ARGUMENT(DE, w.step.size, 0, "csa_tokens.size", "sizeof"),
    ARGUMENT(DE, w.cache.size, 0, "csa_cache.size", "sizeof"),
    ARGUMENT(SC, w.rows_out.size, 0, "csa_rows.size", "sizeof"),
};

/* What is unusual, but right. */
static const mistake peculiarities[] = {
    {P, SET(w.prepare.index_query_out.dtype, CSA_U8), NONE, CSA_OK, "", ""},
    {P, SET(w.prepare.rope.ndim, 0), NONE, CSA_OK, "", ""},
    {P, SET(w.prepare.rope.shape[1], 0), NONE, CSA_OK, "", ""},
    {P, SET(w.prepare.query.ndim, 0), NONE, CSA_OK, "", ""},
    {P, SET(w.prepare.cache, 0), SET(w.step.slots.ndim, 0), CSA_OK, "", ""},
    {P, SET(w.prepare.key_out.ndim, 0), SET(w.prepare.value_out.ndim, 0), CSA_OK, "", ""},
    {P, SET(w.prepare.query.stride[0], 0), NONE, CSA_OK, "", ""},
    {P, SET(w.step.block_table.ndim, 0), NONE, CSA_OK, "", ""},
    {DE, SET(w.step.positions.ndim, 0), NONE, CSA_OK, "", ""},
    {DE, SET(w.step.slots.ndim, 0), NONE, CSA_OK, "", ""},
    {DE, SET(w.step.seq_lens.ndim, 0), SET(w.step.ring_base.ndim, 0), CSA_OK, "", ""},
    {DE, SET(step.regions, 0), SET(w.step.block_table.shape[1], 1000), CSA_ERROR_WORKSPACE, "workspace", ""},
    {DE, SET(step.gate.ndim, 0), SET(step.lse.ndim, 0), CSA_OK, "", ""},
    {DE, SET(step.rows_out, 0), NONE, CSA_OK, "", ""},
    {DE, SET(w.cache.k_scale, 0), SET(w.cache.v_scale, 0), CSA_OK, "", ""},
    {SD, SET(w.step.ring_base.ndim, 0), SET(w.cache.ring.ndim, 0), CSA_OK, "", ""},
    {SD, SET(w.cache.kv.ndim, 0), NONE, CSA_OK, "", ""},
    {SM, SET(metadata.key.ndim, 0), SET(metadata.cache, 0), CSA_OK, "", ""},
    {SE, SET(select.topk, 1024), SET(select.selected.shape[1], 0), CSA_ERROR_ARGUMENT, "selected", ""},
    {AT, SET(attend.rows, 0), NONE, CSA_OK, "", ""},
    {GA, SET(gate.active.ndim, 0), NONE, CSA_OK, "", ""},
    {LA, SET(layer.rows_out, 0), SET(layer.selected.ndim, 0), CSA_OK, "", ""},
};

static void apply(calls *c, const change *one)
{
    memcpy((char *)c + one->offset, &one->value, one->size);
}

static int faults;

/* Goes on after a fault, so that one run shows all of them. */
static void expect(bool good, const mistake *m, const char *what)
{
    if (!good)
        print_error("%s, \"%s ... %s\": %s; the error text is \"%s\"\n", calls_name(m->call), m->name, m->text,
                    what, test_error());
    faults += !good;
}

static void check_mistake(const mistake *m)
{
    calls c = base;
    calls_link(&c);
    apply(&c, &m->first);
    apply(&c, &m->second);
    uint8_t *before = arena_snapshot(&c.w.memory);
    csa_status status = calls_run(&c, context, m->call);
    const char *text = strchr(test_error(), ':'), *name = calls_name(m->call);
    expect(status == m->status, m, csa_status_name(status));
    if (status != CSA_OK) {
        expect(strncmp(test_error(), name, strlen(name)) == 0, m, "the call is not named");
        expect(strstr(test_error(), m->name) && strstr(test_error(), m->text), m, "the text is another");
        expect(arena_unchanged(&c.w.memory, before), m, "something was written");
    }
    free(before);
    if (m->call > CSA_OP_LAYER)
        return;
    char said[600];
    snprintf(said, sizeof said, "csa_supported%s", text ? text : "");
    expect(csa_supported(context, (csa_op)m->call, calls_args(&c, m->call)) == status, m,
           "csa_supported differs");
    expect(status == CSA_OK || strcmp(said, test_error()) == 0, m, "csa_supported says something else");
}

static void mistakes_are_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++)
        check_mistake(&mistakes[i]);
    CHECK(faults == 0);
}

static void peculiarities_are_accepted(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof peculiarities / sizeof *peculiarities; i++)
        check_mistake(&peculiarities[i]);
    CHECK(faults == 0);
}

/* ---- All calls ---------------------------------------------------------------------------------- */

static void valid_calls_are_accepted(void **state)
{
    (void)state;
    for (int call = 1; call <= CALLS; call++) {
        calls c = base;
        calls_link(&c);
        CHECK_OK(calls_run(&c, context, call));
        if (call <= CSA_OP_LAYER)
            CHECK_OK(csa_supported(context, (csa_op)call, calls_args(&c, call)));
    }
}

static void null_is_refused_everywhere(void **state)
{
    (void)state;
    for (int call = 1; call <= CSA_OP_LAYER; call++) {
        calls c = base;
        calls_link(&c);
        CHECK(calls_run(&c, NULL, call) == CSA_ERROR_ARGUMENT);
        CHECKF(strstr(test_error(), "context is NULL"), "%s", test_error());
        CHECK(csa_supported(NULL, (csa_op)call, calls_args(&c, call)) == CSA_ERROR_ARGUMENT);
        CHECK(csa_supported(context, (csa_op)call, NULL) == CSA_ERROR_ARGUMENT);
        CHECKF(strstr(test_error(), "_args is NULL"), "%s", test_error());
    }
    CHECK(csa_score(context, NULL) == CSA_ERROR_ARGUMENT);
    CHECK(csa_decode(context, NULL) == CSA_ERROR_ARGUMENT);
    CHECK(csa_layer(context, NULL, NULL) == CSA_ERROR_ARGUMENT);
    CHECK(csa_supported(context, (csa_op)0, &base) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "no operation 0"), "%s", test_error());
    CHECK(csa_supported(context, (csa_op)99, &base) == CSA_ERROR_ARGUMENT);
}

/* csa_supported follows no data pointer. */
static void made_up_pointers_will_do(void **state)
{
    (void)state;
    calls c = base;
    calls_link(&c);
    csa_tensor *all[] = {
        &c.step.index_query, &c.step.index_weights, &c.step.query,        &c.step.gate,
        &c.step.out,         &c.step.lse,           &c.step.selected,     &c.w.step.block_table,
        &c.w.step.slots,     &c.w.step.positions,   &c.w.step.owners,     &c.w.step.seq_lens,
        &c.w.step.ring_base, &c.w.step.query_start, &c.w.cache.kv,        &c.w.cache.summaries,
        &c.w.cache.ring,     &c.w.rows_out.active,  &c.w.rows_out.lengths};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        all[i]->data = (void *)(uintptr_t)(256 * (i + 1));
    c.step.workspace.data = (void *)(uintptr_t)256;
    CHECK_OK(csa_supported(context, CSA_OP_DECODE, &c.step));
}

/* A larger descriptor is fine while what this library does not know is zero; a smaller one lacks what is zero.
 */
static void descriptors_of_other_versions(void **state)
{
    (void)state;
    calls c = base;
    calls_link(&c);
    struct {
        csa_step_args args;
        uint64_t news[4];
    } larger;
    memset(&larger, 0, sizeof larger);
    larger.args = c.step;
    larger.args.size = sizeof larger;
    CHECK_OK(csa_decode(context, &larger.args));
    larger.news[2] = 1;
    CHECK(csa_decode(context, &larger.args) == CSA_ERROR_UNSUPPORTED);
    CHECKF(strstr(test_error(), "csa_step_args uses a field at byte"), "%s", test_error());
    CHECKF(strstr(test_error(), csa_version_string()), "%s", test_error());
    csa_attend_args attend = c.attend;
    attend.size = offsetof(csa_attend_args, lse); /* neither lse nor scale: what lies there is not read */
    attend.lse.ndim = 77;
    attend.scale = NAN;
    CHECK_OK(csa_attend(context, &attend));
    CHECK(!isnan(tensor_value(&c.w.out, 0, 0, 0, 0)));
    attend.size = offsetof(csa_attend_args, out);
    CHECK(csa_attend(context, &attend) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "out is absent"), "%s", test_error());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(valid_calls_are_accepted),   cmocka_unit_test(mistakes_are_named),
        cmocka_unit_test(peculiarities_are_accepted), cmocka_unit_test(null_is_refused_everywhere),
        cmocka_unit_test(made_up_pointers_will_do),   cmocka_unit_test(descriptors_of_other_versions),
    };
    test_seed();
    return cmocka_run_group_tests(tests, make_calls, end_calls);
}
