// IEEE 754 binary32.
fn elements(start: u32, column: u32, count: u32) -> vec4<f32> {
    let at = start / 4u + column;
    var found = vec4<f32>(bitcast<f32>(weights[at]), 0.0, 0.0, 0.0);
    if count > 1u {
        found.y = bitcast<f32>(weights[at + 1u]);
    }
    if count > 2u {
        found.z = bitcast<f32>(weights[at + 2u]);
    }
    if count > 3u {
        found.w = bitcast<f32>(weights[at + 3u]);
    }
    return found;
}
