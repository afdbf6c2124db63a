// How long llama.cpp takes to go on with a long prompt whose state is in a file, beside `.ci/measure-restore`.
//
//     npm install --no-save node-llama-cpp@3.22.1        brings llama.cpp compiled for most processors
//     node bench/peers/restore.mjs m.gguf 32768 compute state.bin
//     node bench/peers/restore.mjs m.gguf 32768 restore state.bin [cold]
//
// `compute` computes the tokens that `.ci/measure-restore` asks for and saves their state. `restore` loads it in a process
// that has just started and computes a token more; `cold` takes the file out of the page cache first. Prints JSON: seconds,
// and memory by the kernel's account (PSS).
import {execFileSync} from "node:child_process";
import fs from "node:fs";
import {getLlama} from "node-llama-cpp";

const [modelPath, tokens, what, file, cold] = process.argv.slice(2);
if (!["compute", "restore"].includes(what) || !file) {
    console.error("usage: node restore.mjs MODEL TOKENS compute|restore FILE [cold]");
    process.exit(2);
}
const count = Number(tokens);
const seconds = () => performance.now() / 1000;
const pssBytes = () => Number(fs.readFileSync("/proc/self/smaps_rollup", "utf8").match(/^Pss:\s+(\d+)/m)[1]) * 1024;

const llama = await getLlama({gpu: false, build: "never", skipDownload: true, maxThreads: 2, logLevel: "error"});
const model = await llama.loadModel({modelPath, useMmap: true});
const context = await model.createContext({contextSize: count + 64, batchSize: 512, threads: 2, flashAttention: true});
const sequence = context.getSequence();
let begun = seconds();
if (what === "compute") {
    const prompt = Array.from({length: count}, (_, index) => 1000 + (7919 * index) % 20011);
    const piece = 2048;
    for (let start = 0; start < count; start += piece) {
        await sequence.evaluateWithoutGeneratingNewTokens(prompt.slice(start, start + piece));
        console.error(`${Math.min(start + piece, count)} of ${count} tokens after ${Math.round(seconds() - begun)} s`);
    }
    const computed = seconds() - begun;
    begun = seconds();
    await sequence.saveStateToFile(file);
    console.log(JSON.stringify({computed_seconds: computed, saved_seconds: seconds() - begun, bytes: fs.statSync(file).size}));
} else {
    if (cold) {
        // Reads nothing, and tells the kernel that what it has of the file is not needed.
        execFileSync("dd", [`if=${file}`, "iflag=nocache", "count=0", "status=none"]);
        begun = seconds();
    }
    await sequence.loadStateFromFile(file, {acceptRisk: true});
    const loaded = seconds() - begun;
    for await (const _ of sequence.evaluate([1234], {temperature: 0})) break;
    console.log(JSON.stringify({loaded_seconds: loaded, first_token_seconds: seconds() - begun, pss_bytes: pssBytes()}));
}
process.exit(0);
