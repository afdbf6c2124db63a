// 256 weights in 210 bytes: 128 bytes of four low bits, 64 of two high bits, 16 scales `i8`, `d: f16`; weight
// `d * scale * (q - 32)`, sixteen weights to a scale. Of each half, 32 bytes of high bits and 64 of low ones have
// four runs of 32 weights.
fn load(start: u32, number: u32) -> Unit {
    let at = start + number / 8u * 210u;
    let half = number % 8u / 4u;
    let run = number % 4u;
    let low_from = at + half * 64u + (run % 2u) * 32u;
    let high_from = at + 128u + half * 32u;
    let low_shift = vec4<u32>(4u * (run / 2u));
    let high_shift = vec4<u32>(2u * run);
    let twos = vec4<u32>(0x03030303u);
    let low_bits = ((words(high_from) >> high_shift) & twos) << vec4<u32>(4u);
    let high_bits = ((words(high_from + 16u) >> high_shift) & twos) << vec4<u32>(4u);
    let low = less(((words(low_from) >> low_shift) & NIBBLES) | low_bits, 32u);
    let high = less(((words(low_from + 16u) >> low_shift) & NIBBLES) | high_bits, 32u);
    let scales = half_word(at + 192u + half * 8u + run * 2u);
    let first = f32(bitcast<i32>(scales << 24u) >> 24u);
    let second = f32(bitcast<i32>(scales << 16u) >> 24u);
    return Unit(low, high, half_float(at + 208u) * vec2<f32>(first, second), 0.0);
}
