// 32 weights in 18 bytes: `d: f16`, 32 nibbles, the low ones first; weight `d * (q - 8)`.
fn load(start: u32, number: u32) -> Unit {
    let at = start + number * 18u;
    let packed = words(at + 2u);
    let low = less(packed & NIBBLES, 8u);
    let high = less((packed >> vec4<u32>(4u)) & NIBBLES, 8u);
    return Unit(low, high, vec2<f32>(half_float(at)), 0.0);
}
