// 32 weights in 20 bytes: `d: f16`, `m: f16`, 32 nibbles, the low ones first; weight `d * q + m`.
fn load(start: u32, number: u32) -> Unit {
    let at = start + number * 20u;
    let packed = words(at + 4u);
    let low = packed & NIBBLES;
    let high = (packed >> vec4<u32>(4u)) & NIBBLES;
    return Unit(low, high, vec2<f32>(half_float(at)), -half_float(at + 2u));
}
