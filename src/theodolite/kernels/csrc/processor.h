/* What this processor, and the system with its registers, can run. */

static int always(void) { return 1; }

#if defined(X86)

static void leaf(uint32_t number, uint32_t part, uint32_t registers[4]) {
#if defined(_MSC_VER)
    __cpuidex((int *)registers, (int)number, (int)part);
#else
    __cpuid_count(number, part, registers[0], registers[1], registers[2], registers[3]);
#endif
}

static uint64_t saved_registers(void) {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
#endif
}

static int bit(uint32_t word, int number) { return (int)(word >> number & 1u); }

static int has_avx2(void) {
    uint32_t first[4], seventh[4];
    leaf(0, 0, first);
    if (first[0] < 7)
        return 0;
    leaf(1, 0, first);
    /* OSXSAVE, AVX, F16C; then AVX2; and the system keeps the upper halves. */
    if (!bit(first[2], 27) || !bit(first[2], 28) || !bit(first[2], 29) || (saved_registers() & 0x6) != 0x6)
        return 0;
    leaf(7, 0, seventh);
    return bit(seventh[1], 5);
}

static int has_avx512(void) {
    uint32_t seventh[4];
    if (!has_avx2() || (saved_registers() & 0xe6) != 0xe6)
        return 0;
    leaf(7, 0, seventh);
    /* F, DQ, BW, VL */
    return bit(seventh[1], 16) && bit(seventh[1], 17) && bit(seventh[1], 30) && bit(seventh[1], 31);
}

static int has_avx512_bf16(void) {
    uint32_t seventh[4];
    if (!has_avx512())
        return 0;
    leaf(7, 0, seventh);
    if (seventh[0] < 1)
        return 0;
    leaf(7, 1, seventh);
    return bit(seventh[0], 5);
}

#endif
