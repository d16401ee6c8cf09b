/*
 * The `csa` command: finds the subcommand.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "tool.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *does;
} subcommands[] = {
    {"bench", tool_bench, "times of stages and steps, and the machine's limits beside them"},
    {"info", tool_info, "back ends, instruction sets, and why one is unavailable"},
    {"inspect", tool_inspect, "what a row selected and why"},
    {"replay", tool_replay, "run recorded calls and compare"},
    {"run", tool_run, "a serving-like run over a captured or generated context"},
    {"size", tool_size, "bytes and operations of a serving configuration"},
};

enum { SUBCOMMANDS = sizeof subcommands / sizeof subcommands[0] };

static void help(FILE *out)
{
    fputs("usage: csa SUBCOMMAND [OPTION...]\n\n"
          "Compressed sparse attention: tools around libcsa.\n\nsubcommands:\n",
          out);
    for (int i = 0; i < SUBCOMMANDS; i++)
        fprintf(out, "  %-8s %s\n", subcommands[i].name, subcommands[i].does);
    fputs("\noptions:\n"
          "  --help, --version; `csa SUBCOMMAND --help` says more, with examples; --json on each\n\n"
          "exit codes: 0 ok, 1 check failed, 2 usage, 3 unsupported here, 4 bad input file, 5 internal\n",
          out);
}

/* Data that did not reach stdout (a full disk, a closed pipe) is a failure, whatever the subcommand says. */
static int finish(int code)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    fputs("csa: cannot write the output\n", stderr);
    return TOOL_INTERNAL;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        help(stderr);
        return TOOL_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        help(stdout);
        return finish(TOOL_OK);
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("csa %s\n", csa_version_string());
        return finish(TOOL_OK);
    }
    for (int i = 0; i < SUBCOMMANDS; i++)
        if (strcmp(argv[1], subcommands[i].name) == 0)
            return finish(subcommands[i].run(argc - 1, argv + 1));
    fprintf(stderr, "csa: unknown subcommand '%s'; `csa --help` lists what there is\n", argv[1]);
    return TOOL_USAGE;
}
