// IEEE 754 binary16.
fn two_of(word: u32) -> vec2<f32> {
    return unpack2x16float(word);
}
