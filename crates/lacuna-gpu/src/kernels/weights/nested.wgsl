// Scales and minima of six bits, of eight sub-blocks, in twelve bytes: what Q4_K and Q5_K have in common.
fn scale_and_minimum(at: u32, sub_block: u32) -> vec2<f32> {
    if sub_block < 4u {
        let scale = byte(at + sub_block) & 63u;
        let minimum = byte(at + sub_block + 4u) & 63u;
        return vec2<f32>(f32(scale), f32(minimum));
    }
    let low = byte(at + sub_block + 4u);
    let scale = (low & 15u) | ((byte(at + sub_block - 4u) >> 6u) << 4u);
    let minimum = (low >> 4u) | ((byte(at + sub_block) >> 6u) << 4u);
    return vec2<f32>(f32(scale), f32(minimum));
}
