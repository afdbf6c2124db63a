// Keys and values whose elements are floats and whose heads are whole vectors of 16 bytes: as nearly all are.

fn eight_of(packed: vec4<u32>, element: u32) -> Eight {
    if element == 1u {
        let one = unpack2x16float(packed.x);
        let two = unpack2x16float(packed.y);
        let three = unpack2x16float(packed.z);
        let four = unpack2x16float(packed.w);
        return Eight(vec4<f32>(one, two), vec4<f32>(three, four));
    }
    let even = bitcast<vec4<f32>>(packed << vec4<u32>(16u));
    let odd = bitcast<vec4<f32>>(packed & vec4<u32>(0xffff0000u));
    return Eight(vec4<f32>(even.x, odd.x, even.y, odd.y), vec4<f32>(even.z, odd.z, even.w, odd.w));
}

// Eight elements of a row of keys, from the element `i` on.
fn keys_of(row: u32, head: u32, i: u32) -> Eight {
    let element = p.elements % 4u;
    let start = p.key_skip + (row - p.first_row) * p.key_stride;
    if element == 0u {
        let at = start + (head * p.key_dim + i) / 4u;
        let last = select(at + 1u, at, i + 4u >= p.key_dim);
        return Eight(bitcast<vec4<f32>>(key_vector(at)), bitcast<vec4<f32>>(key_vector(last)));
    }
    return eight_of(key_vector(start + (head * p.key_dim + i) / 8u), element);
}

fn values_of(row: u32, head: u32, i: u32) -> Eight {
    let element = p.elements / 4u;
    let start = p.value_skip + (row - p.first_row) * p.value_stride;
    if element == 0u {
        let at = start + (head * p.value_dim + i) / 4u;
        // A head of floats may end in the middle.
        let last = select(at + 1u, at, i + 4u >= p.value_dim);
        return Eight(bitcast<vec4<f32>>(value_vector(at)), bitcast<vec4<f32>>(value_vector(last)));
    }
    return eight_of(value_vector(start + (head * p.value_dim + i) / 8u), element);
}
