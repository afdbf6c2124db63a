// The upper half of a binary32.
fn elements(start: u32, column: u32, count: u32) -> vec4<f32> {
    let at = start + 2u * column;
    var found = vec4<f32>(bitcast<f32>(half_word(at) << 16u), 0.0, 0.0, 0.0);
    if count > 1u {
        found.y = bitcast<f32>(half_word(at + 2u) << 16u);
    }
    if count > 2u {
        found.z = bitcast<f32>(half_word(at + 4u) << 16u);
    }
    if count > 3u {
        found.w = bitcast<f32>(half_word(at + 6u) << 16u);
    }
    return found;
}
