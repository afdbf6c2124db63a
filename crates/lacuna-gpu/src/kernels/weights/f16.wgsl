// IEEE 754 binary16.
fn elements(start: u32, column: u32, count: u32) -> vec4<f32> {
    let at = start + 2u * column;
    var found = vec4<f32>(half_float(at), 0.0, 0.0, 0.0);
    if count > 1u {
        found.y = half_float(at + 2u);
    }
    if count > 2u {
        found.z = half_float(at + 4u);
    }
    if count > 3u {
        found.w = half_float(at + 6u);
    }
    return found;
}
