// A row: nibbles, then a byte of exponent of each 32; weight `2^(exponent - 128) * q`, where a nibble is a float of a sign,
// two bits of exponent and one of fraction, and `q` twice that, which is whole: 0, 1, 2, 3, 4, 6, 8 or 12.
const LESS = 0;
const HALVES_DIFFER = false;
const HAS_MINIMUM = false;

const ONES = vec4<u32>(0x01010101u);

// `q` of a nibble in each byte, by its bits: with an exponent of none it is the fraction, with others (2 + fraction) times
// the power of two below.
fn whole(nibbles: vec4<u32>) -> vec4<u32> {
    let fraction = nibbles & ONES;
    let low = (nibbles >> vec4<u32>(1u)) & ONES;
    let high = (nibbles >> vec4<u32>(2u)) & ONES;
    let negative = (nibbles >> vec4<u32>(3u)) & ONES;
    let first = fraction & ~high;
    let second = (low & ~high) | (high & fraction & ~low);
    let third = high & (fraction | ~low);
    let fourth = high & low;
    let magnitude = first | (second << vec4<u32>(1u)) | (third << vec4<u32>(2u)) | (fourth << vec4<u32>(3u));
    // Less twice itself where it is negative, each byte for itself: none borrows from the next.
    let twice = (magnitude << vec4<u32>(1u)) & (negative * 0xffu);
    return ((magnitude | vec4<u32>(0x80808080u)) - twice) ^ vec4<u32>(0x80808080u);
}

// 2^(exponent - 128) as two factors, because no float has an exponent as large as the largest.
fn power(exponent: u32) -> f32 {
    let half = exponent / 2u;
    return bitcast<f32>((half + 63u) << 23u) * bitcast<f32>((exponent - half + 63u) << 23u);
}

fn load(row: u32, number: u32) -> Unit {
    let packed = weights[row + number];
    let behind = words[4u * (row + p.units) + number / 4u];
    let scale = power((behind >> (8u * (number % 4u))) & 0xffu);
    return Unit(whole(packed & NIBBLES), whole((packed >> vec4<u32>(4u)) & NIBBLES), vec2<f32>(scale), 0.0);
}
