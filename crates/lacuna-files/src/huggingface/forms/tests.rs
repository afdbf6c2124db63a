//! What is wrong with quantized folders is a typed error that names the tensor or the field.

use serde_json::json;

use super::blocks::{Grouped, Levels, Order, Target, Zero};
use super::*;
use crate::conversion::ConversionError;
use crate::mapping::Mapping;
use crate::safetensors;
use crate::tensor::Error as TensorError;

/// Name, type, shape, and the byte that all of it consists of.
type Line<'a> = (&'a str, &'a str, &'a [usize], u8);

fn file(lines: &[Line<'_>]) -> Tensors {
    let filled = lines.iter().map(|&(name, dtype, shape, byte)| {
        let size = match dtype {
            "I64" => 8,
            "F32" | "I32" | "U32" => 4,
            "F16" | "BF16" => 2,
            _ => 1,
        };
        let bytes = vec![byte; size * shape.iter().product::<usize>()];
        (name, dtype, shape, bytes)
    });
    file_of(&filled.collect::<Vec<_>>())
}

/// The same of bytes that are written out.
fn file_of(lines: &[(&str, &str, &[usize], Vec<u8>)]) -> Tensors {
    let (mut header, mut data) = (Map::new(), Vec::<u8>::new());
    for (name, dtype, shape, bytes) in lines {
        let start = data.len();
        data.extend(bytes);
        let line = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
        header.insert((*name).to_owned(), line);
    }
    let header = serde_json::to_string(&header).unwrap();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    safetensors::parse(&Mapping::from(bytes)).unwrap()
}

fn read_with(config: &Value, lines: &[Line<'_>]) -> Result<Tensors, FormError> {
    let config = config.as_object().unwrap();
    super::read(config, &file(lines))
}

/// The refusal, in words.
fn refusal(config: &Value, lines: &[Line<'_>]) -> String {
    match read_with(config, lines) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{config} {lines:?} is accepted"),
    }
}

/// What converting the only matrix ends with.
fn conversion(config: &Value, lines: &[Line<'_>], name: &str) -> String {
    let tensors = read_with(config, lines).unwrap();
    match tensors.get(name) {
        Err(error @ TensorError::Conversion { .. }) => error.to_string(),
        other => panic!("{config} {lines:?}: {other:?}"),
    }
}

fn names_all(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn method(name: &str) -> Value {
    json!({"quantization_config": {"quant_method": name}})
}

/// The method with other settings.
fn with(name: &str, settings: &Value) -> Value {
    let mut config = method(name);
    let object = config["quantization_config"].as_object_mut().unwrap();
    object.extend(settings.as_object().unwrap().clone());
    config
}

#[test]
fn a_method_that_is_not_known_is_refused_and_none_is_not() {
    let message = refusal(&method("bitsandbytes"), &[]);
    names_all(&message, &["bitsandbytes", "gptq", "compressed-tensors"]);
    names_all(
        &refusal(&json!({"quantization_config": {"load_in_4bit": true}}), &[]),
        &["no method"],
    );
    names_all(
        &refusal(&with("gptq", &json!({"checkpoint_format": "marlin"})), &[]),
        &["marlin"],
    );
    names_all(
        &refusal(&with("awq", &json!({"version": "gemv"})), &[]),
        &["version", "gemv"],
    );
    names_all(
        &refusal(&with("fp8", &json!({"fmt": "e5m2"})), &[]),
        &["fmt", "e5m2"],
    );
    for block in [
        json!([0, 128]),
        json!("128"),
        json!([128]),
        json!([1, 2, 3]),
    ] {
        let settings = json!({"weight_block_size": block});
        names_all(
            &refusal(&with("fp8", &settings), &[]),
            &["weight_block_size"],
        );
    }
    let compressed = |settings| refusal(&with("compressed-tensors", &settings), &[]);
    names_all(
        &compressed(json!({"format": "nvfp4-pack-quantized"})),
        &["format", "nvfp4"],
    );
    names_all(
        &compressed(json!({"sparsity_config": {"format": "sparse-24"}})),
        &["sparse-24"],
    );
    let transform = json!({"transform_config": {"config_groups": {"R1": {}}}});
    names_all(&compressed(transform), &["transform_config"]);
    let three = json!({"config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}}});
    names_all(&compressed(three), &["num_bits", "3"]);
    for config in [json!({}), json!({"quantization_config": null})] {
        assert!(read_with(&config, &[]).is_ok());
    }
}

#[test]
fn fp8_needs_scales_that_fit_and_numbers() {
    let weights = ("x.weight", "F8_E4M3", &[4, 32][..], 0x38);
    let fp8 = with("fp8", &json!({"weight_block_size": [2, 16]}));
    names_all(&refusal(&fp8, &[weights]), &["x.weight_scale", "x.weight"]);
    for shape in [&[3][..], &[2, 1], &[2, 3], &[4, 5], &[2, 2, 1]] {
        let message = refusal(&fp8, &[weights, ("x.weight_scale_inv", "F32", shape, 0)]);
        names_all(
            &message,
            &["x.weight_scale_inv", &format!("{shape:?}"), "[2, 2]"],
        );
    }
    let message = refusal(&fp8, &[weights, ("x.weight_scale_inv", "I64", &[2, 2], 0)]);
    names_all(&message, &["x.weight_scale_inv", "i64"]);
    let flat = ("x.weight", "F8_E4M3", &[128][..], 0x38);
    names_all(
        &refusal(&fp8, &[flat, ("x.weight_scale", "F32", &[1], 0)]),
        &["x.weight", "matrix"],
    );
    let one = ("x.weight_scale", "F32", &[1][..], 0);
    for byte in [0x7F, 0xFF] {
        let weights = ("x.weight", "F8_E4M3", &[4, 32][..], byte);
        names_all(
            &conversion(&fp8, &[weights, one], "x.weight"),
            &["row 0", "`x.weight`", "finite"],
        );
    }
    let scale = ("x.weight_scale", "F32", &[1][..], 0xFF);
    names_all(
        &conversion(&fp8, &[weights, scale], "x.weight"),
        &["`x.weight_scale`", "finite"],
    );
    // 0x7E7E7E7E is some 8e37.
    let scale = ("x.weight_scale", "F32", &[1][..], 0x7E);
    names_all(
        &conversion(&fp8, &[weights, scale], "x.weight"),
        &["`x.weight_scale`", "65504"],
    );
}

/// 64 inputs in groups of 32, of 8 outputs.
const GPTQ: [Line<'static>; 4] = [
    ("x.qweight", "I32", &[8, 8], 0x99),
    ("x.qzeros", "I32", &[2, 1], 0x77),
    ("x.scales", "F16", &[2, 8], 0x22),
    ("x.g_idx", "I32", &[64], 0),
];

/// The lines with one in the place of that of its name.
fn instead<'a>(lines: &[Line<'a>], line: Line<'a>) -> Vec<Line<'a>> {
    let mut lines = lines.to_vec();
    *lines.iter_mut().find(|old| old.0 == line.0).unwrap() = line;
    lines
}

#[test]
fn gptq_needs_all_its_parts_in_shapes_that_go_together() {
    let sym = json!({"group_size": 32, "sym": true, "desc_act": true});
    let gptq = with("gptq", &sym);
    assert!(read_with(&gptq, &GPTQ).unwrap().get("x.weight").is_ok());
    for missing in 1..GPTQ.len() {
        let mut lines = GPTQ.to_vec();
        let (name, ..) = lines.remove(missing);
        names_all(&refusal(&gptq, &lines), &[name, "x.qweight"]);
    }
    let wrong: [(Line<'_>, &[&str]); 6] = [
        (
            ("x.qzeros", "I32", &[2, 3], 0),
            &["x.qzeros", "[2, 3]", "[2, 1]"],
        ),
        (("x.qzeros", "I32", &[3, 1], 0), &["x.qzeros", "[3, 1]"]),
        (("x.qzeros", "F32", &[2, 1], 0), &["x.qzeros", "f32"]),
        (("x.scales", "F16", &[2, 9], 0), &["[2, 1]"]),
        (("x.scales", "F16", &[16], 0), &["x.scales", "matrix"]),
        (("x.g_idx", "I32", &[63], 0), &["x.g_idx", "[63]", "[64]"]),
    ];
    for (line, parts) in wrong {
        names_all(&refusal(&gptq, &instead(&GPTQ, line)), parts);
    }
    // Three groups of 64 columns, and two that are said to be of 16.
    let lines = instead(&GPTQ, ("x.qzeros", "I32", &[3, 1], 0x77));
    let lines = instead(&lines, ("x.scales", "F16", &[3, 8], 0x22));
    names_all(&refusal(&gptq, &lines), &["x.scales", "64", "3 groups"]);
    let sixteen = with("gptq", &json!({"group_size": 16, "desc_act": true}));
    names_all(&refusal(&sixteen, &GPTQ), &["x.scales", "64", "2 groups"]);
    let both = [GPTQ.to_vec(), vec![("x.weight", "F32", &[1], 0)]].concat();
    names_all(&refusal(&gptq, &both), &["x.weight", "twice"]);
}

#[test]
fn gptq_with_groups_or_zero_points_that_there_cannot_be_is_not_converted() {
    let convert = |settings, lines: &[Line<'_>]| {
        let mut all = json!({"group_size": 32});
        let settings: &Value = &settings;
        all.as_object_mut()
            .unwrap()
            .extend(settings.as_object().unwrap().clone());
        conversion(&with("gptq", &all), lines, "x.weight")
    };
    let beyond = instead(&GPTQ, ("x.g_idx", "I32", &[64], 1));
    let message = convert(json!({"desc_act": true}), &beyond);
    names_all(&message, &["x.g_idx", "column 0", "16843009", "0 to 1"]);
    let negative = instead(&GPTQ, ("x.g_idx", "I32", &[64], 0xFF));
    names_all(
        &convert(json!({"desc_act": true}), &negative),
        &["x.g_idx", "-1"],
    );
    let message = convert(json!({"desc_act": false}), &GPTQ);
    names_all(&message, &["x.g_idx", "column 32", "desc_act"]);
    // Where the order does not matter, what is said of it must still be right.
    let ordered = |lines: &[Line<'static>]| lines[..3].to_vec();
    let zeros = instead(&ordered(&GPTQ), ("x.qzeros", "I32", &[2, 1], 0));
    let message = convert(json!({"sym": true}), &zeros);
    names_all(&message, &["x.qzeros", "zero point 1", "sym"]);
    let scales = instead(&ordered(&GPTQ), ("x.scales", "F16", &[2, 8], 0x7F));
    names_all(
        &convert(json!({"sym": true}), &scales),
        &["x.scales", "finite"],
    );
}

#[test]
fn gptq_with_a_zero_point_before_a_large_one_is_converted() {
    let zeros = 0x7FFF_FFFFu32.to_le_bytes();
    let tensors = file_of(&[
        ("x.qweight", "I32", &[8, 8], vec![0x99; 256]),
        ("x.qzeros", "I32", &[2, 1], [zeros, zeros].concat()),
        ("x.scales", "F16", &[2, 8], vec![0x22; 32]),
    ]);
    let gptq = with("gptq", &json!({"group_size": 32}));
    let tensors = super::read(gptq.as_object().unwrap(), &tensors).unwrap();
    assert!(tensors.require("x.weight").is_ok());
}

#[test]
fn awq_needs_all_its_parts_in_shapes_that_go_together() {
    let lines: [Line<'_>; 3] = [
        ("x.qweight", "I32", &[64, 1], 0x12),
        ("x.qzeros", "I32", &[2, 1], 0x34),
        ("x.scales", "F16", &[2, 8], 0x22),
    ];
    let awq = with(
        "awq",
        &json!({"bits": 4, "group_size": 32, "zero_point": true}),
    );
    assert_eq!(
        read_with(&awq, &lines)
            .unwrap()
            .require("x.weight")
            .unwrap()
            .shape(),
        [8, 64]
    );
    for missing in 1..lines.len() {
        let mut lines = lines.to_vec();
        let (name, ..) = lines.remove(missing);
        names_all(&refusal(&awq, &lines), &[name, "x.qweight"]);
    }
    for (name, dtype, shape) in [
        ("x.qzeros", "I32", &[1, 1][..]),
        ("x.qzeros", "I64", &[2, 1]),
        ("x.scales", "F16", &[2, 7]),
        ("x.scales", "I32", &[2, 8]),
        ("x.qweight", "F32", &[64, 1]),
    ] {
        names_all(
            &refusal(&awq, &instead(&lines, (name, dtype, shape, 0))),
            &["x."],
        );
    }
    names_all(
        &refusal(&with("awq", &json!({"group_size": 48})), &lines),
        &["x.scales", "64"],
    );
    names_all(
        &refusal(&with("awq", &json!({"bits": 3})), &lines),
        &["bits", "3"],
    );
}

/// 8 rows of 64 columns in 4 bits, in groups of 32.
const PACKED: [Line<'static>; 4] = [
    ("x.weight_packed", "I32", &[8, 8], 0x12),
    ("x.weight_scale", "BF16", &[8, 2], 0x3C),
    ("x.weight_zero_point", "I32", &[1, 2], 0x34),
    ("x.weight_shape", "I32", &[2], 0),
];

/// The same with a shape that is filled in.
fn packed(rows: i64, columns: i64) -> Tensors {
    let lines: Vec<Line<'_>> = PACKED[..3].to_vec();
    let tensors = file(&lines);
    let mut shape = (rows.to_le_bytes()).to_vec();
    shape.extend(columns.to_le_bytes());
    let header = json!({"x.weight_shape": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}});
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(shape);
    let other = safetensors::parse(&Mapping::from(bytes)).unwrap();
    Tensors::merge([tensors, other]).unwrap()
}

#[test]
fn packed_numbers_need_a_shape_that_is_theirs() {
    let config = method("compressed-tensors");
    let read = |tensors: &Tensors| super::read(config.as_object().unwrap(), tensors);
    let whole = read(&packed(8, 64)).unwrap();
    assert_eq!(whole.require("x.weight").unwrap().shape(), [8, 64]);
    for (rows, columns) in [
        (7, 64),
        (8, 65),
        (8, 128),
        (8, 0),
        (-8, -64),
        (8, i64::MAX),
        (8, i64::MIN),
    ] {
        let message = match read(&packed(rows, columns)) {
            Err(error) => error.to_string(),
            Ok(tensors) => panic!("{rows} x {columns}: {tensors:?}"),
        };
        assert!(message.contains("x.weight"), "{message}");
    }
    // Zero points are needed where the description says that nothing is symmetric.
    let asymmetric = json!({"config_groups": {"a": {"weights": {
        "num_bits": 4, "type": "int", "symmetric": false,
    }}}});
    let without: Vec<Line<'_>> = [&PACKED[..2], &PACKED[3..]].concat();
    let message = refusal(&with("compressed-tensors", &asymmetric), &without);
    names_all(&message, &["x.weight_shape", "8 rows"]);
    let bytes: [Line<'_>; 2] = [
        ("x.weight", "I8", &[4, 32], 1),
        ("x.weight_scale", "F32", &[4, 1], 0),
    ];
    let message = refusal(&with("compressed-tensors", &asymmetric), &bytes);
    names_all(&message, &["x.weight_zero_point", "x.weight"]);
    for shape in [&[4, 3][..], &[3, 1], &[4], &[4, 0]] {
        let scale = ("x.weight_scale", "F32", shape, 0);
        let message = refusal(&config, &instead(&bytes, scale));
        names_all(&message, &["x.weight_scale"]);
    }
}

#[test]
fn each_row_has_its_own_zero_point_also_where_all_have_one_scale() {
    let weights = ("x.weight", "I8", &[2, 32][..], vec![7; 64]);
    let scale = ("x.weight_scale", "F32", &[1][..], vec![0, 0, 0x80, 0x3F]);
    let config = method("compressed-tensors");
    let read = |shape, zeros| {
        let zeros = ("x.weight_zero_point", "I8", shape, zeros);
        let tensors = file_of(&[weights.clone(), scale.clone(), zeros]);
        let tensors = super::read(config.as_object().unwrap(), &tensors).unwrap();
        let made = tensors.require("x.weight").unwrap();
        assert_eq!((made.dtype(), made.shape()), (DType::Q8_0, &[2, 32][..]));
        // A row is one block, whose largest weight is 127 steps.
        let rows = made.bytes().as_chunks::<34>().0.iter();
        let worth = |row: &[u8; 34]| {
            let step = half::f16::from_le_bytes([row[0], row[1]]).to_f32();
            (step * f32::from(row[2] as i8)).round()
        };
        rows.map(worth).collect::<Vec<_>>()
    };
    assert_eq!(read(&[2, 1][..], vec![5, 3]), [2.0, 4.0]);
    assert_eq!(read(&[2, 1], vec![5, -3i8 as u8]), [2.0, 10.0]);
    for shape in [&[1][..], &[1, 1]] {
        assert_eq!(read(shape, vec![5]), [2.0, 2.0]);
    }
}

#[test]
fn mlx_needs_settings_and_shapes_that_go_together() {
    let lines: [Line<'_>; 3] = [
        ("x.weight", "U32", &[4, 8], 0x12),
        ("x.scales", "F16", &[4, 1], 0x22),
        ("x.biases", "F16", &[4, 1], 0x22),
    ];
    let with = |settings: Value| json!({"quantization": settings});
    let usual = with(json!({"group_size": 64, "bits": 4}));
    assert_eq!(
        read_with(&usual, &lines)
            .unwrap()
            .require("x.weight")
            .unwrap()
            .dtype(),
        DType::Q4_1
    );
    for settings in [
        json!({"group_size": 64}),
        json!({"group_size": 64, "bits": 0}),
        json!({"group_size": 64, "bits": 9}),
        json!({"group_size": 64, "bits": "4"}),
    ] {
        names_all(&refusal(&with(settings), &lines), &["`bits`"]);
    }
    for size in [json!(0), json!(-64), json!(1u64 << 40)] {
        let message = refusal(&with(json!({"group_size": size, "bits": 4})), &lines);
        names_all(&message, &["`group_size`"]);
    }
    let nvfp4 = with(json!({"group_size": 16, "bits": 4, "mode": "nvfp4"}));
    names_all(&refusal(&nvfp4, &lines), &["mode", "nvfp4"]);
    let mxfp4 = with(json!({"group_size": 64, "bits": 4, "mode": "mxfp4"}));
    names_all(&refusal(&mxfp4, &lines), &["group_size", "groups of 32"]);
    let own = with(json!({"group_size": 64, "bits": 4, "x": 8}));
    names_all(&refusal(&own, &lines), &["`x`"]);
    let own = with(json!({"group_size": 64, "bits": 4, "x": {"bits": 5}}));
    names_all(
        &refusal(&own, &lines),
        &["x.weight", "groups of 64 numbers of 5 bits"],
    );
    names_all(&refusal(&usual, &lines[..2]), &["x.biases", "x.weight"]);
    names_all(&refusal(&usual, &lines[1..]), &["x.weight", "x.scales"]);
    for (name, dtype, shape) in [
        ("x.scales", "F16", &[4, 2][..]),
        ("x.biases", "F16", &[4]),
        ("x.biases", "I32", &[4, 1]),
        ("x.weight", "F32", &[4, 8]),
        ("x.weight", "U32", &[8]),
        ("x.weight", "U32", &[4, 7]),
    ] {
        names_all(
            &refusal(&usual, &instead(&lines, (name, dtype, shape, 0))),
            &[name],
        );
    }
    for part in ["x.scales", "x.biases"] {
        let lines = instead(&lines, (part, "F16", &[4, 1], 0xFF));
        names_all(&conversion(&usual, &lines, "x.weight"), &[part, "finite"]);
    }
}

#[test]
fn stacked_experts_need_blocks_and_scales_of_one_shape() {
    let lines: [Line<'_>; 3] = [
        ("a.experts.gate_up_proj_blocks", "U8", &[2, 4, 1, 16], 0x12),
        ("a.experts.gate_up_proj_scales", "U8", &[2, 4, 1], 120),
        ("a.experts.gate_up_proj_bias", "BF16", &[2, 4], 0),
    ];
    let config = method("mxfp4");
    let tensors = read_with(&config, &lines).unwrap();
    let shape = |name: &str| tensors.require(name).unwrap().shape().to_vec();
    assert_eq!(shape("a.experts.gate_proj.weight"), [2, 2, 32]);
    assert_eq!(shape("a.experts.up_proj.bias"), [2, 2]);
    names_all(&refusal(&config, &lines[..1]), &["gate_up_proj_scales"]);
    for (index, dtype, shape) in [
        (0, "U8", &[2, 4, 1, 15][..]),
        (0, "U8", &[2, 4, 16]),
        (0, "I8", &[2, 4, 1, 16]),
        (0, "U8", &[2, 3, 1, 16]),
        (1, "U8", &[2, 4, 2]),
        (1, "F32", &[2, 4, 1]),
        (2, "BF16", &[2, 3]),
        (2, "I32", &[2, 4]),
    ] {
        let (name, ..) = lines[index];
        let message = refusal(&config, &instead(&lines, (name, dtype, shape, 0)));
        names_all(&message, &["gate_up_proj_"]);
    }
    let scales = instead(&lines, (lines[1].0, "U8", &[2, 4, 1], 0xFF));
    let message = conversion(&config, &scales, "a.experts.up_proj.weight");
    names_all(&message, &["gate_up_proj_scales", "finite"]);
}

#[test]
fn sizes_that_overflow_are_refused_or_empty() {
    let endless = 1usize << 57;
    let gptq: [Line<'_>; 3] = [
        ("x.qweight", "I32", &[endless, 0], 0),
        ("x.qzeros", "I32", &[1, 0], 0),
        ("x.scales", "F16", &[1, 0], 0),
    ];
    let read = read_with(&method("gptq"), &gptq);
    assert!(
        read.is_err()
            || read
                .unwrap()
                .get("x.weight")
                .unwrap()
                .unwrap()
                .bytes()
                .is_empty()
    );
    let rows = 1usize << 61;
    let gptq: [Line<'_>; 3] = [
        ("x.qweight", "I32", &[0, rows], 0),
        ("x.qzeros", "I32", &[0, rows / 4], 0),
        ("x.scales", "F16", &[0, rows], 0),
    ];
    names_all(&refusal(&method("gptq"), &gptq), &["x.qzeros"]);
    let experts: [Line<'_>; 2] = [
        ("a.gate_up_proj_blocks", "U8", &[0, 2, endless, 16], 0),
        ("a.gate_up_proj_scales", "U8", &[0, 2, endless], 0),
    ];
    names_all(
        &refusal(&method("mxfp4"), &experts),
        &["a.gate_proj", "larger than any memory"],
    );
    let mlx: [Line<'_>; 3] = [
        ("x.weight", "U32", &[0, endless], 0),
        ("x.scales", "F16", &[0, endless / 8], 0),
        ("x.biases", "F16", &[0, endless / 8], 0),
    ];
    let config = json!({"quantization": {"bits": 2, "group_size": 128}});
    let read = read_with(&config, &mlx);
    assert!(
        read.is_err()
            || read
                .unwrap()
                .get("x.weight")
                .unwrap()
                .unwrap()
                .bytes()
                .is_empty()
    );
}

#[test]
fn what_is_converted_is_made_once_and_only_while_somebody_has_it() {
    let lines = GPTQ[..3].to_vec();
    let tensors = read_with(&with("gptq", &json!({"sym": true})), &lines).unwrap();
    let summary = tensors.iter().next().unwrap();
    assert_eq!(
        (summary.name, summary.converted_from),
        ("x.weight", Some("gptq"))
    );
    let first = tensors.require("x.weight").unwrap();
    let second = tensors.clone().require("x.weight").unwrap();
    assert!(std::ptr::eq(first.bytes(), second.bytes()));
    assert_eq!(summary.bytes, first.bytes().len());
    let held = first.mapping().downgrade();
    drop((first, second));
    assert!(held.upgrade().is_none(), "nobody has it");
    assert!(tensors.require("x.weight").is_ok(), "and it is made again");
}

#[test]
fn what_was_let_go_of_is_read_again() {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../reference/forms/gptq/hf");
    let folder = crate::huggingface::Folder::open(fixture.as_ref()).unwrap();
    let tensors = folder.tensors().unwrap();
    let convert = || {
        let tensor = tensors
            .require("model.layers.0.mlp.up_proj.weight")
            .unwrap();
        tensor.bytes().to_vec()
    };
    let first = convert();
    tensors.release_sources();
    assert!(convert() == first);
}

#[test]
fn experts_of_a_mixture_are_turned_round_unless_they_have_been() {
    let config = json!({
        "model_type": "qwen3_vl_moe_text", "hidden_size": 2, "moe_intermediate_size": 3,
    });
    let lies = |lines: &[Line<'_>]| {
        let tensors = read_with(&config, lines).unwrap();
        let all = tensors
            .iter()
            .map(|it| (it.name.to_owned(), it.shape.to_vec()));
        all.collect::<Vec<_>>()
    };
    let (both, down) = ("x.experts.gate_up_proj", "x.experts.down_proj");
    let published = lies(&[(both, "F32", &[4, 2, 6], 0), (down, "F32", &[4, 3, 2], 0)]);
    assert!(published.contains(&(format!("{both}.weight"), vec![4, 6, 2])));
    assert!(published.contains(&(format!("{down}.weight"), vec![4, 2, 3])));
    let turned = lies(&[(both, "F32", &[4, 6, 2], 0), (down, "F32", &[4, 2, 3], 0)]);
    assert!(turned.contains(&(both.to_owned(), vec![4, 6, 2])));
    assert!(turned.contains(&(down.to_owned(), vec![4, 2, 3])));
    let message = refusal(&config, &[(both, "F32", &[2, 6], 0)]);
    names_all(&message, &[both, "[2, 6]"]);
    let message = refusal(&config, &[(down, "I32", &[4, 3, 2], 0)]);
    names_all(&message, &[down, "bf16"]);
}

/// A matrix whose numbers are all 0.
#[derive(Debug)]
struct Zeros;

impl Levels for Zeros {
    fn row(&self, _: usize, _: &mut [u8]) {}

    fn zero(&self, _: usize, _: usize) -> Zero {
        Zero::Level(0)
    }

    fn scale(&self, _: usize, _: usize) -> usize {
        0
    }
}

#[test]
fn a_group_that_came_to_be_wrong_after_it_was_checked_is_an_error() {
    let tensors = file(&[("s", "F32", &[1], 0), ("g", "I32", &[32], 1)]);
    let part = |name| Part::new(tensors.find(name).unwrap());
    let grouped = Grouped {
        levels: Zeros,
        scales: part("s").floats().unwrap(),
        columns: 32,
        group: 32,
        order: Order::Listed(part("g").words().unwrap()),
        target: Target::Rounded,
        zeros: "z".to_owned(),
    };
    let wrong = ConversionError::Group {
        part: "g".to_owned(),
        column: 0,
        found: 0x0101_0101,
        expected: "one of 0 to 0".to_owned(),
    };
    // As its check would say, which is left out here.
    assert_eq!(grouped.write(0, &mut [0; 34]), Err(wrong.clone()));
    assert_eq!(grouped.check(), Err(wrong));
}

/// Rows that cannot be made.
#[derive(Debug)]
struct Broken;

impl Rows for Broken {
    fn write(&self, row: usize, _: &mut [u8]) -> Result<(), ConversionError> {
        panic!("row {row} is broken on purpose")
    }
}

#[test]
fn a_panic_in_a_conversion_is_an_error() {
    // Rows enough for all threads that there are.
    let conversion = Conversion::new("none", 64, 1 << 20, Box::new(Broken)).unwrap();
    assert_eq!(conversion.convert().unwrap_err(), ConversionError::Broken);
    assert_eq!(conversion.convert().unwrap_err(), ConversionError::Broken);
}
