// What a byte of a block is worth, as the processor has it. Devices may divide by some last places off, and not all add what is
// multiplied without rounding between: enough to round what lies in the middle between two bytes the other way, of which weights
// of few bits make many.

// Below this a block counts as zero; its reciprocal would overflow.
const SMALLEST = 1e-35;

// A float's twelve leading bits: products of these, and of what they leave, are exact.
fn leading(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) & 0xfffff000u);
}

// The quotient that is nearest, of numbers near one.
fn divided(a: f32, b: f32) -> f32 {
    let near = a / b;
    let near_leading = leading(near);
    let near_rest = near - near_leading;
    let b_leading = leading(b);
    let b_rest = b - b_leading;
    let left = (((a - near_leading * b_leading) - near_leading * b_rest) - near_rest * b_leading) - near_rest * b_rest;
    return near + left / b;
}

// Of a block whose largest magnitude this is: what a byte is worth (most / 127), and how many there are to one (127 / most).
fn unit_of(most: f32) -> vec2<f32> {
    if most < SMALLEST {
        return vec2<f32>();
    }
    let bits = bitcast<u32>(most);
    let exponent = bits >> 23u;
    if exponent == 255u {
        return vec2<f32>(most, 0.0);
    }
    // From one to below two, and the power of two that it is multiplied by; of its reciprocal twice as much, because that of the
    // largest would be too small for a float.
    let near_one = bitcast<f32>((bits & 0x7fffffu) | 0x3f800000u);
    let power = bitcast<f32>(exponent << 23u);
    let twice_reciprocal = bitcast<f32>((255u - exponent) << 23u);
    return vec2<f32>(
        divided(near_one, 127.0) * power,
        divided(127.0, near_one) * 0.5 * twice_reciprocal,
    );
}
