/* One request decodes 100 tokens through one layer: cc decode.c $(pkg-config --cflags --libs csa) -lm */
#include <csa/csa.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { GROUPS = 1, HEADS = 16, INDEX_HEADS = 4, BLOCK = 64, BLOCKS = 4, RING = 8, TOKENS = 100, ROTARY = 64 };

/* Stands for a model: some bf16 values around one. */
static uint16_t *projection(size_t n)
{
    uint16_t *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (uint16_t)(0x3F00 + rand() % 256 + (rand() % 2 << 15));
    return x;
}

static void expect(csa_status status)
{
    char text[512];
    if (status == CSA_OK)
        return;
    csa_last_error(text, sizeof text);
    fprintf(stderr, "%s\n", text);
    exit(1);
}

int main(void)
{
    /* A context, and the workspace its steps need. */
    csa_context *context;
    csa_serving serving = {.size = sizeof serving, .regions = BLOCKS * BLOCK / CSA_REGION, .decode_tokens = 1};
    csa_workspace workspace;
    expect(csa_context_create(NULL, &context));
    expect(csa_workspace_size(NULL, &serving, &workspace.bytes));
    workspace.data = aligned_alloc(256, (workspace.bytes + 255) / 256 * 256);
    expect(csa_warm_up(context, &serving, workspace));

    /* The layer's cache: KV, summaries and tail ring belong to the engine. */
    csa_cache cache = {.size = sizeof cache, .ring_capacity = RING};
    cache.kv = csa_tensor_4d(calloc(BLOCKS * GROUPS * BLOCK * CSA_KV_SIZE, 2), CSA_BF16, BLOCKS, GROUPS, BLOCK,
                             CSA_KV_SIZE);
    cache.summaries = csa_tensor_3d(calloc(BLOCKS * BLOCK / CSA_REGION, CSA_SUMMARY_SIZE), CSA_E4M3, BLOCKS,
                                    BLOCK / CSA_REGION, CSA_SUMMARY_SIZE);
    cache.ring = csa_tensor_2d(calloc(RING * CSA_RING_SIZE, 2), CSA_BF16, RING, CSA_RING_SIZE);

    /* The step: one token of one request, whose tokens lie in blocks 2, 0, 3, 1. */
    int32_t table[BLOCKS] = {2, 0, 3, 1};
    int64_t slot, position, ring_base = 0;
    csa_tokens tokens = {.size = sizeof tokens};
    tokens.block_table = csa_tensor_2d(table, CSA_I32, 1, BLOCKS);
    tokens.slots = csa_tensor_1d(&slot, CSA_I64, 1);
    tokens.positions = csa_tensor_1d(&position, CSA_I64, 1);
    tokens.ring_base = csa_tensor_1d(&ring_base, CSA_I64, 1);

    /* Projections in; prepared queries, keys and weights out. Queries and index keys are prepared in place. */
    csa_prepare_args prepare = {.size = sizeof prepare, .tokens = &tokens, .cache = &cache, .eps = 1e-5F};
    prepare.index_query = csa_tensor_4d(NULL, CSA_BF16, 1, GROUPS, INDEX_HEADS, CSA_SUMMARY_SIZE);
    prepare.index_key = csa_tensor_2d(NULL, CSA_BF16, 1, CSA_SUMMARY_SIZE);
    prepare.index_weights = csa_tensor_3d(projection(INDEX_HEADS), CSA_BF16, 1, GROUPS, INDEX_HEADS);
    prepare.index_query_norm = csa_tensor_1d(projection(CSA_SUMMARY_SIZE), CSA_BF16, CSA_SUMMARY_SIZE);
    prepare.index_key_norm = csa_tensor_1d(projection(CSA_SUMMARY_SIZE), CSA_BF16, CSA_SUMMARY_SIZE);
    prepare.index_key_bias = csa_tensor_1d(projection(CSA_SUMMARY_SIZE), CSA_BF16, CSA_SUMMARY_SIZE);
    prepare.index_rope =
        csa_tensor_2d(projection(TOKENS * CSA_INDEX_ROTARY), CSA_BF16, TOKENS, CSA_INDEX_ROTARY);
    prepare.index_query_out = csa_tensor_4d(malloc(GROUPS * CSA_INDEX_HEADS * CSA_SUMMARY_SIZE), CSA_E4M3, 1,
                                            GROUPS, CSA_INDEX_HEADS, CSA_SUMMARY_SIZE);
    prepare.index_weights_out =
        csa_tensor_3d(malloc(GROUPS * CSA_INDEX_HEADS * sizeof(float)), CSA_F32, 1, GROUPS, CSA_INDEX_HEADS);
    prepare.query = csa_tensor_4d(NULL, CSA_BF16, 1, GROUPS, HEADS, CSA_HEAD_SIZE);
    prepare.key = csa_tensor_3d(NULL, CSA_BF16, 1, GROUPS, CSA_HEAD_SIZE);
    prepare.value = csa_tensor_3d(NULL, CSA_BF16, 1, GROUPS, CSA_HEAD_SIZE);
    prepare.query_norm = csa_tensor_1d(projection(CSA_HEAD_SIZE), CSA_BF16, CSA_HEAD_SIZE);
    prepare.key_norm = csa_tensor_1d(projection(CSA_HEAD_SIZE), CSA_BF16, CSA_HEAD_SIZE);
    prepare.rope = csa_tensor_2d(projection(TOKENS * ROTARY), CSA_BF16, TOKENS, ROTARY);

    uint16_t *out = malloc(GROUPS * HEADS * CSA_HEAD_SIZE * sizeof *out);
    csa_layer_args layer = {.size = sizeof layer, .prepare = &prepare, .topk = 4, .workspace = workspace};
    layer.scale = 1 / sqrtf(CSA_HEAD_SIZE);
    layer.out = csa_tensor_4d(out, CSA_BF16, 1, GROUPS, HEADS, CSA_HEAD_SIZE);

    for (position = 0; position < TOKENS; position++) {
        slot = (int64_t)table[position / BLOCK] * BLOCK + position % BLOCK;
        prepare.index_query.data = projection(GROUPS * INDEX_HEADS * CSA_SUMMARY_SIZE);
        prepare.index_key.data = projection(CSA_SUMMARY_SIZE);
        prepare.index_key_out = prepare.index_key;
        prepare.query.data = projection(GROUPS * HEADS * CSA_HEAD_SIZE);
        prepare.query_out = prepare.query;
        prepare.key.data = projection(GROUPS * CSA_HEAD_SIZE);
        prepare.value.data = projection(GROUPS * CSA_HEAD_SIZE);
        layer.z = csa_tensor_2d(projection(CSA_SUMMARY_SIZE), CSA_BF16, 1, CSA_SUMMARY_SIZE);
        expect(csa_layer(context, NULL, &layer));
    }
    printf("%d tokens, each attending to at most %d regions of 8; first output 0x%04x\n", TOKENS,
           layer.topk + 1, (unsigned)out[0]);
    csa_context_destroy(context);
    return 0;
}
