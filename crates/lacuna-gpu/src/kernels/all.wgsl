// Every row with the only matrix there is: workgroups have neighbours.

// Where the matrix begins in the window, in sixteen bytes.
const matrix = 0u;

// The first of a workgroup's rows, and how many of at most so many it has.
fn share(number: u32, most: u32) -> vec2<u32> {
    let first = number * most;
    return vec2<u32>(first, min(p.tokens - first, most));
}

fn input_row(place: u32) -> u32 {
    return place;
}

fn output_row(place: u32) -> u32 {
    return place;
}

fn input_rows(first: u32, count: u32) -> vec4<u32> {
    return first + vec4<u32>(0u, 1u, 2u, 3u);
}
