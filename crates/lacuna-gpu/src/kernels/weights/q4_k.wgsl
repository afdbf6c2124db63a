// 256 weights in 144 bytes: `d: f16`, `dmin: f16`, scales and minima, 256 nibbles; 32 bytes have two sub-blocks, the
// low nibbles the first. Weight `d * scale * q - dmin * minimum`.
fn load(start: u32, number: u32) -> Unit {
    let at = start + number / 8u * 144u;
    let sub_block = number % 8u;
    let nested = scale_and_minimum(at + 4u, sub_block);
    let source = at + 16u + sub_block / 2u * 32u;
    let shift = vec4<u32>(4u * (sub_block % 2u));
    let low = (words(source) >> shift) & NIBBLES;
    let high = (words(source + 16u) >> shift) & NIBBLES;
    let scale = half_float(at) * nested.x;
    return Unit(low, high, vec2<f32>(scale), half_float(at + 2u) * nested.y);
}
