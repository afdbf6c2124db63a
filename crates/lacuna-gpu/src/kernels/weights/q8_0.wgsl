// 32 weights in 34 bytes: `d: f16`, `q: [i8; 32]`; weight `d * q`.
fn load(start: u32, number: u32) -> Unit {
    let at = start + number * 34u;
    return Unit(words(at + 2u), words(at + 18u), vec2<f32>(half_float(at)), 0.0);
}
