/* One decode step of one request over 8192 cached tokens: score, select, attend. */
#include <csa/csa.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 16, INDEX_HEADS = 4, BLOCK = 64, BLOCKS = 128, LENGTH = BLOCK * BLOCKS };

int main(void)
{
    csa_context *context;
    csa_serving serving = {.size = sizeof serving, .regions = LENGTH / CSA_REGION, .decode_tokens = 1};
    csa_workspace workspace;
    if (csa_context_create(NULL, &context) || csa_workspace_size(NULL, &serving, &workspace.bytes))
        return 1;
    workspace.data = aligned_alloc(256, (workspace.bytes + 255) / 256 * 256);

    /* The engine's memory, here filled with zeros: a layer's cache, one token's queries, its output. */
    csa_cache cache = {.size = sizeof cache};
    cache.kv = csa_tensor_4d(calloc(LENGTH * CSA_KV_SIZE, 2), CSA_BF16, BLOCKS, 1, BLOCK, CSA_KV_SIZE);
    cache.summaries =
        csa_tensor_3d(calloc(LENGTH / 8, CSA_SUMMARY_SIZE), CSA_E4M3, BLOCKS, BLOCK / 8, CSA_SUMMARY_SIZE);
    int32_t table[BLOCKS], length = LENGTH;
    for (int i = 0; i < BLOCKS; i++)
        table[i] = BLOCKS - 1 - i;
    csa_tokens tokens = {.size = sizeof tokens};
    tokens.block_table = csa_tensor_2d(table, CSA_I32, 1, BLOCKS);
    tokens.seq_lens = csa_tensor_1d(&length, CSA_I32, 1);

    int64_t selected[CSA_DEFAULT_TOPK + 1];
    csa_step_args step = {.size = sizeof step, .tokens = &tokens, .cache = &cache, .workspace = workspace};
    step.index_query = csa_tensor_4d(calloc(INDEX_HEADS, 256), CSA_E4M3, 1, 1, INDEX_HEADS, CSA_SUMMARY_SIZE);
    step.index_weights = csa_tensor_3d(calloc(INDEX_HEADS, 4), CSA_F32, 1, 1, INDEX_HEADS);
    step.query = csa_tensor_4d(calloc(HEADS * CSA_HEAD_SIZE, 2), CSA_BF16, 1, 1, HEADS, CSA_HEAD_SIZE);
    step.out = step.query; /* the output may take the query's place */
    step.selected = csa_tensor_2d(selected, CSA_I64, 1, CSA_DEFAULT_TOPK + 1);
    step.scale = 1 / sqrtf(CSA_HEAD_SIZE);
    if (csa_decode(context, &step)) {
        char text[512];
        csa_last_error(text, sizeof text);
        fprintf(stderr, "%s\n", text);
        return 1;
    }
    printf("attended to regions %d to %d and %d\n", (int)selected[0], (int)selected[CSA_DEFAULT_TOPK - 1],
           (int)selected[CSA_DEFAULT_TOPK]);
    csa_context_destroy(context);
    return 0;
}
