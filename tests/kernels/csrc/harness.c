/* The rotation in C held to a plain model of it, bit by bit, by every instruction set that runs here.
 *
 *     cc -std=c11 -O1 -ffp-contract=off -I src/theodolite/kernels/csrc tests/kernels/csrc/harness.c \
 *         src/theodolite/kernels/csrc/rotate.c -lm -pthread && ./a.out
 */

#include <signal.h>

#include "large.h"
#include "refusals.h"
#include "special.h"
#include "trial.h"

static int digit(int *number, int n) {
    const int value = *number % n;
    *number /= n;
    return value;
}

/* What is not said yet, at random: over many calls it meets every value of what is. */
static void settle(struct options *o) {
    o->rotary_dim = below(2) ? o->head_dim : 2 * (1 + below(o->head_dim / 2));
    o->first_channel = below(2) ? o->head_dim - o->rotary_dim : 0;
    o->out_order = (int)below(WRITABLE);
    /* Where q and k lie between each other, only the caller can see that they are apart. */
    o->apart = (o->in_place ? o->order : o->out_order) == FUSED ? 1 : (int)below(2);
    o->positions_shared = (int)below(2);
    o->table_batch = below(2) ? o->batch : 1;
    o->rows = o->tokens + below(4);
    o->rare = 32;
}

/* Every option with every other, in small sizes. */
static void small_sizes(void) {
    static const int64_t head_dims[] = {2, 6, 8, 20, 34, 40, 66, 80, 130};
    int number;
    for (number = 0; number < 4 * 5 * 2 * 2 * 2 * 2 * READABLE * 3 * 3; number++) {
        struct options o = {.rare = 32};
        int left = number, given, which;
        o.type = digit(&left, 4);
        o.table_type = digit(&left, 5);
        o.interleaved = digit(&left, 2);
        o.conjugate = digit(&left, 2);
        o.by_channel = digit(&left, 2);
        o.in_place = digit(&left, 2);
        o.order = digit(&left, READABLE);
        o.position_size = 4 * digit(&left, 3);
        given = 1 + digit(&left, 3);
        if (o.in_place && o.order >= WRITABLE)
            continue;
        o.batch = 1 + below(3);
        o.tokens = 1 + below(4);
        o.table_heads = below(2) ? 1 : 1 + below(3);
        o.head_dim = head_dims[below(9)];
        for (which = 0; which < 2; which++)
            o.heads[which] = given >> which & 1 ? o.table_heads * (1 + below(5)) : 0;
        settle(&o);
        try_options(o, "small sizes");
    }
}

/* The sizes of models: widths, lengths, types and pairs each with each, twice; the other options at random. */
static void sizes_of_models(void) {
    static const int64_t head_dims[] = {2, 6, 64, 80, 96, 128, 256, 512};
    static const int64_t tokens[] = {1, 63, 100}, heads[] = {1, 3, 5, 8};
    int number;
    for (number = 0; number < 2 * 8 * 3 * 4 * 2; number++) {
        struct options o = {.rare = 32};
        int left = number;
        int64_t groups;
        o.head_dim = head_dims[digit(&left, 8)];
        o.tokens = tokens[digit(&left, 3)];
        o.type = digit(&left, 4);
        o.interleaved = digit(&left, 2);
        o.batch = below(2) ? 1 : 3;
        o.heads[0] = heads[below(4)];
        o.table_heads = below(2) ? 1 : o.heads[0];
        groups = o.heads[0] / o.table_heads;
        o.heads[1] = below(3) == 0 ? 0 : o.table_heads * (1 + below(groups));
        if (below(4) == 0) {
            o.heads[1] = o.heads[0];
            o.heads[0] = 0;
        }
        o.table_type = (int)below(5);
        o.conjugate = (int)below(2);
        o.by_channel = (int)below(2);
        o.in_place = (int)below(2);
        o.order = (int)below(o.in_place ? WRITABLE : READABLE);
        o.position_size = 4 * (int)below(3);
        settle(&o);
        try_options(o, "sizes of models");
    }
}

int main(void) {
    int32_t set;
    signal(SIGSEGV, fault);
    signal(SIGBUS, fault);
    signal(SIGILL, fault);
    decode_halves();
    sets_by_name();
    small_sizes();
    sizes_of_models();
    special_values();
    refusals();
    large_calls();
    printf("ok: %ld checks, sets:", checks);
    for (set = 0; set < theodolite_sets(); set++)
        if (theodolite_set_runs(set))
            printf(" %s", theodolite_set_name(set));
    printf("\n");
    return 0;
}
