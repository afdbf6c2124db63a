//! Chunks of WebP files, looked at before the decoder is: it makes room for all that a chunk says it has, whether or
//! not the file goes on for so long, and decodes frames of any size before it compares that with the image's. One pass
//! over the chunks' headers; nothing is copied.

/// Bytes of `RIFF`, the length of what follows, and `WEBP`.
const FILE_HEADER_BYTES: usize = 12;
/// Bytes of a frame's place and size, before its own chunks.
const FRAME_HEADER_BYTES: usize = 16;

/// Kinds of chunks that the decoder knows.
const KNOWN: [&[u8; 4]; 9] = [
    b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF", b"ICCP", b"EXIF", b"XMP ",
];

/// Looks at the chunks of a file, and at those of its frames. The error says what is wrong with one.
pub(crate) fn check(file: &[u8]) -> Result<(), String> {
    // None where the file is a frame and nothing else, which says the image's size.
    let mut canvas = None;
    for (index, chunk) in Chunks(file.get(FILE_HEADER_BYTES..).unwrap_or_default()).enumerate() {
        let chunk = chunk?;
        if index == 0 && &chunk.kind == b"VP8X" {
            // The decoder would read on in the next one.
            let short = || format!("chunk `VP8X` has only {} bytes", chunk.contents.len());
            canvas = Some(chunk.canvas().ok_or_else(short)?);
        }
        chunk.check_size(canvas)?;
        if &chunk.kind == b"ANMF" {
            let inner = chunk.contents.get(FRAME_HEADER_BYTES..);
            for chunk in Chunks(inner.unwrap_or_default()) {
                chunk?.check_size(canvas)?;
            }
        }
    }
    Ok(())
}

/// One that lies in the file as a whole.
struct Chunk<'a> {
    kind: [u8; 4],
    contents: &'a [u8],
}

impl Chunk<'_> {
    /// The image's width and height, of the chunk that says them.
    fn canvas(&self) -> Option<[u32; 2]> {
        let side = |at: usize| {
            let bytes = self.contents.get(at..)?.first_chunk::<3>()?;
            Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]) + 1)
        };
        Some([side(4)?, side(7)?])
    }

    /// Width and height by the frame's own header, where this is a frame: 14 bits each.
    fn frame(&self) -> Option<[u32; 2]> {
        let bytes = |at: usize| self.contents.get(at..)?.first_chunk::<4>();
        let sides = |bits: u32, second: u32| [bits & 0x3FFF, (bits >> second) & 0x3FFF];
        match &self.kind {
            // Behind a tag and the start code; each in two bytes of its own.
            b"VP8 " => Some(sides(u32::from_le_bytes(*bytes(6)?), 16)),
            // Behind a byte that is the same in all files; less 1.
            b"VP8L" => Some(sides(u32::from_le_bytes(*bytes(1)?), 14).map(|side| side + 1)),
            _ => None,
        }
    }

    /// Refuses a frame that is larger than the image.
    fn check_size(&self, canvas: Option<[u32; 2]>) -> Result<(), String> {
        match (self.frame(), canvas) {
            (Some([width, height]), Some([most, rows])) if width > most || height > rows => Err(
                format!("a frame has {width} x {height} pixels, and the image {most} x {rows}"),
            ),
            _ => Ok(()),
        }
    }
}

/// Chunks one after another.
struct Chunks<'a>(&'a [u8]);

impl<'a> Iterator for Chunks<'a> {
    type Item = Result<Chunk<'a>, String>;

    fn next(&mut self) -> Option<Self::Item> {
        let (kind, rest) = self.0.split_first_chunk::<4>()?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let length = u32::from_le_bytes(*length) as usize;
        let Some(contents) = rest.get(..length) else {
            self.0 = &[];
            // Some programs put bytes of their own after an image; the decoder makes no room for those.
            return KNOWN.contains(&kind).then(|| {
                let kind = kind.escape_ascii();
                let left = rest.len();
                Err(format!(
                    "chunk `{kind}` claims {length} bytes, and {left} are left"
                ))
            });
        };
        // Chunks start at even places.
        self.0 = rest.get(length + length % 2..).unwrap_or_default();
        let kind = *kind;
        Some(Ok(Chunk { kind, contents }))
    }
}
