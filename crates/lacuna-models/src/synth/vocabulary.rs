//! A byte-level vocabulary of a real one's size: any text has tokens, and all special tokens are
//! real.
//!
//! ```text
//! 256 bytes | merged pieces of common words | filler up to the ordinary tokens' number | special | unused
//! ```
//!
//! Every merge joins two tokens into a third, and none but the chains below exist, so encoding is
//! the same in every engine. Filler tokens are ordinary text that no merge produces: a random model
//! generates them, nothing encodes to them.

use super::SpecialTokens;
use lacuna_files::gguf::Writer;

/// GGUF's token types.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Each of these becomes one token with the space before it, through a chain of merges from its
/// front.
const WORDS: &str = "the of and to in is that for it as was with be by on not he his but at are this have \
    from or had an they which one you were all her she there would their we him been has when who will no \
    more if out so up said what its about than into them can only other time new some could these two may \
    first then do any like my now over such our man me even most made after also did many off before must \
    well back through years much where your way down should because long each just state those people too \
    mr how little good world make very year still see own work men day get here between both life being \
    under three never know same last another while us might great go come since against right came take \
    used himself few use place during high without again home around small however found mrs thought went \
    say part once general upon school every don does got united left number course war until always away \
    something fact water though less public put think almost hand enough far took head yet better system \
    set told nothing night end why called find going look asked later point knew next city program give \
    memory page function return value type string number list model token cache buffer thread data code \
    write read error file line test build run call let mut pub use struct enum match impl trait move ownership \
    borrow reference lifetime compiler library example variable integer pointer stack heap result option";

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + \
    message['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\\n' }}{% endif %}";

const LLAMA3: &str = "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + \
    message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";

/// Where Qwen's special tokens start, and which they are.
const QWEN_ORDINARY: usize = 151_643;
const QWEN_SPECIAL: [(&str, i32); 26] = [
    ("<|endoftext|>", CONTROL),
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<|object_ref_start|>", CONTROL),
    ("<|object_ref_end|>", CONTROL),
    ("<|box_start|>", CONTROL),
    ("<|box_end|>", CONTROL),
    ("<|quad_start|>", CONTROL),
    ("<|quad_end|>", CONTROL),
    ("<|vision_start|>", CONTROL),
    ("<|vision_end|>", CONTROL),
    ("<|vision_pad|>", CONTROL),
    ("<|image_pad|>", CONTROL),
    ("<|video_pad|>", CONTROL),
    ("<tool_call>", USER_DEFINED),
    ("</tool_call>", USER_DEFINED),
    ("<|fim_prefix|>", CONTROL),
    ("<|fim_middle|>", CONTROL),
    ("<|fim_suffix|>", CONTROL),
    ("<|fim_pad|>", CONTROL),
    ("<|repo_name|>", CONTROL),
    ("<|file_sep|>", CONTROL),
    ("<tool_response>", USER_DEFINED),
    ("</tool_response>", USER_DEFINED),
    ("<think>", USER_DEFINED),
    ("</think>", USER_DEFINED),
];

/// Where Llama 3's special tokens start, and those that are not merely reserved.
const LLAMA_ORDINARY: usize = 128_000;
const LLAMA_SPECIAL: [(usize, &str); 8] = [
    (0, "<|begin_of_text|>"),
    (1, "<|end_of_text|>"),
    (4, "<|finetune_right_pad_id|>"),
    (6, "<|start_header_id|>"),
    (7, "<|end_header_id|>"),
    (8, "<|eom_id|>"),
    (9, "<|eot_id|>"),
    (10, "<|python_tag|>"),
];

const DEEPSEEK: &str = "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}\
    {{ 'Assistant: ' + message['content'] + eos_token }}{% else %}{{ message['role'] | capitalize + ': ' + \
    message['content'] + '\\n\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}";

/// Where DeepSeek V2's special tokens start, and which there are of them.
const DEEPSEEK_ORDINARY: usize = 100_000;
const DEEPSEEK_SPECIAL: [&str; 2] = [
    "<\u{ff5c}begin\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
];

/// ChatML's, of which the first ends texts.
const CHATML_SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// The special tokens' numbers and what else differs between families.
#[derive(Clone, Copy)]
struct Special {
    pre: &'static str,
    ordinary: usize,
    bos: u32,
    eos: u32,
    padding: u32,
    add_bos: bool,
    template: &'static str,
}

const QWEN: Special = Special {
    pre: "qwen2",
    ordinary: QWEN_ORDINARY,
    bos: 151_643,
    eos: 151_645,
    padding: 151_643,
    add_bos: false,
    template: CHATML,
};

const LLAMA: Special = Special {
    pre: "llama-bpe",
    ordinary: LLAMA_ORDINARY,
    bos: 128_000,
    eos: 128_009,
    padding: 128_004,
    add_bos: true,
    template: LLAMA3,
};

const DEEPSEEK_V2: Special = Special {
    pre: "deepseek-llm",
    ordinary: DEEPSEEK_ORDINARY,
    bos: 100_000,
    eos: 100_001,
    padding: 100_001,
    add_bos: true,
    template: DEEPSEEK,
};

/// Those of ChatML alone at the end of a vocabulary of `size` tokens.
const fn chatml(size: usize) -> Special {
    let ordinary = size - CHATML_SPECIAL.len();
    let first = ordinary as u32;
    Special {
        pre: "llama-bpe",
        ordinary,
        bos: first,
        eos: first + 2,
        padding: first,
        add_bos: false,
        template: CHATML,
    }
}

/// Tokens, their types, and the merges between them.
pub(super) struct Vocabulary {
    special: Special,
    pub(super) tokens: Vec<String>,
    pub(super) types: Vec<i32>,
    pub(super) merges: Vec<String>,
}

impl Vocabulary {
    /// A vocabulary of exactly `size` tokens, which must have room for the special ones.
    pub(super) fn of(kind: SpecialTokens, size: usize) -> Self {
        let specials = match kind {
            SpecialTokens::Llama3 => LLAMA,
            SpecialTokens::Qwen => QWEN,
            SpecialTokens::DeepSeek => DEEPSEEK_V2,
            SpecialTokens::ChatMl => chatml(size),
        };
        let (mut tokens, merges) = pieces();
        for number in tokens.len()..specials.ordinary {
            tokens.push(format!("\u{120}#{number}"));
        }
        let mut types = vec![NORMAL; tokens.len()];
        for (token, kind) in special(kind) {
            tokens.push(token);
            types.push(kind);
        }
        for number in tokens.len()..size {
            tokens.push(format!("[PAD{number}]"));
            types.push(UNUSED);
        }
        Self {
            special: specials,
            tokens,
            types,
            merges,
        }
    }

    pub(super) fn describe(&self, header: &mut Writer) {
        header
            .set("tokenizer.ggml.model", "gpt2")
            .set("tokenizer.ggml.pre", self.special.pre)
            .set("tokenizer.ggml.tokens", self.tokens.as_slice())
            .set("tokenizer.ggml.token_type", self.types.as_slice())
            .set("tokenizer.ggml.merges", self.merges.as_slice())
            .set("tokenizer.ggml.bos_token_id", self.special.bos)
            .set("tokenizer.ggml.eos_token_id", self.special.eos)
            .set("tokenizer.ggml.padding_token_id", self.special.padding)
            .set("tokenizer.ggml.add_bos_token", self.special.add_bos)
            .set("tokenizer.chat_template", self.special.template);
    }
}

/// The byte tokens, and the tokens that merges make of them, each made once.
fn pieces() -> (Vec<String>, Vec<String>) {
    let mut tokens: Vec<String> = byte_characters().map(String::from).collect();
    let mut merges = Vec::new();
    let mut known: std::collections::HashSet<String> = tokens.iter().cloned().collect();
    for word in WORDS.split_whitespace() {
        let mut piece = String::from('\u{120}');
        for letter in word.chars() {
            let merged = format!("{piece}{letter}");
            if known.insert(merged.clone()) {
                merges.push(format!("{piece} {letter}"));
                tokens.push(merged.clone());
            }
            piece = merged;
        }
    }
    (tokens, merges)
}

/// The characters that byte-level vocabularies write bytes as, in GPT-2's order: printable Latin-1
/// characters stand for themselves, the other bytes for characters from U+0100 on.
fn byte_characters() -> impl Iterator<Item = char> {
    let printable = ('!'..='~')
        .chain('\u{a1}'..='\u{ac}')
        .chain('\u{ae}'..='\u{ff}');
    printable.chain('\u{100}'..='\u{143}')
}

fn special(kind: SpecialTokens) -> Vec<(String, i32)> {
    match kind {
        SpecialTokens::Qwen => QWEN_SPECIAL
            .iter()
            .map(|&(token, kind)| (token.to_owned(), kind))
            .collect(),
        SpecialTokens::DeepSeek => all_control(&DEEPSEEK_SPECIAL),
        SpecialTokens::ChatMl => all_control(&CHATML_SPECIAL),
        SpecialTokens::Llama3 => {
            let mut reserved = 0..;
            let mut token = |at: usize| match LLAMA_SPECIAL.iter().find(|&&(place, _)| place == at)
            {
                Some((_, token)) => (*token).to_owned(),
                None => format!(
                    "<|reserved_special_token_{}|>",
                    reserved.next().unwrap_or(at)
                ),
            };
            (0..256).map(|at| (token(at), CONTROL)).collect()
        }
    }
}

fn all_control(tokens: &[&str]) -> Vec<(String, i32)> {
    let tokens = tokens.iter();
    tokens.map(|&token| (token.to_owned(), CONTROL)).collect()
}
