// 32 weights in 22 bytes: `d: f16`, 32 fifth bits, 32 nibbles, the low ones first; weight `d * (q - 16)`.
fn load(start: u32, number: u32) -> Unit {
    let at = start + number * 22u;
    let bits = word(at + 2u);
    let packed = words(at + 6u);
    let low = less((packed & NIBBLES) | fifth_bits(bits, 0u), 16u);
    let high = less(((packed >> vec4<u32>(4u)) & NIBBLES) | fifth_bits(bits, 16u), 16u);
    return Unit(low, high, vec2<f32>(half_float(at)), 0.0);
}
