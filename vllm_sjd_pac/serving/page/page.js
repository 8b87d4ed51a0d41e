"use strict";

const element = (id) => document.getElementById(id);

/** Colours from dark violet over red to yellow; `share` from 0 to 1. */
function heat(share, alpha) {
  const hue = 280 + share * 140;
  return `hsl(${hue % 360} 85% ${30 + share * 30}% / ${alpha})`;
}

function requestHeaders() {
  const headers = { "Content-Type": "application/json" };
  const key = element("key").value.trim();
  if (key) headers.Authorization = `Bearer ${key}`;
  return headers;
}

function requestBody() {
  const body = { prompt: element("prompt").value, stream: true, sjd_pac: { every_row: true } };
  const negative = element("negative").value.trim();
  if (negative) body.negative_prompt = negative;
  for (const [id, field] of [["guidance", "guidance_scale"], ["seed", "seed"], ["temperature", "temperature"]]) {
    if (element(id).value !== "") body[field] = Number(element(id).value);
  }
  return body;
}

/** The server-sent events of a response, as parsed JSON. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    const blocks = pending.split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield JSON.parse(data);
    }
  }
}

async function showPicture(event) {
  const image = new Image();
  image.src = `data:image/${event.output_format};base64,${event.b64_json}`;
  await image.decode();
  for (const id of ["picture", "map"]) {
    const canvas = element(id);
    canvas.height = Math.round((canvas.width * image.naturalHeight) / image.naturalWidth);
    canvas.style.aspectRatio = `${image.naturalWidth} / ${image.naturalHeight}`;
    const context = canvas.getContext("2d");
    context.filter = id === "map" ? "grayscale(1)" : "none";
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    context.filter = "none";
  }
}

/** Tint every token by the number of tokens that its forward pass committed. */
function showMap(accepted, grid) {
  const canvas = element("map");
  const context = canvas.getContext("2d");
  const width = canvas.width / grid.columns;
  const height = canvas.height / grid.rows;
  const most = Math.max(...accepted) + 1;
  let token = 0;
  for (const drafts of accepted) {
    for (let step = 0; step <= drafts; step += 1, token += 1) {
      const row = Math.floor(token / grid.rowLength);
      const column = token % grid.rowLength;
      if (row >= grid.rows || column >= grid.columns) continue;
      context.fillStyle = heat(drafts / Math.max(1, most - 1), 0.6);
      context.fillRect(column * width, row * height, width, height);
    }
  }
  element("high").textContent = String(most);
  canvas.dataset.tokens = String(token);
}

function showSteps(accepted) {
  const canvas = element("steps");
  const context = canvas.getContext("2d");
  const most = Math.max(...accepted) + 1;
  const width = canvas.width / accepted.length;
  context.clearRect(0, 0, canvas.width, canvas.height);
  accepted.forEach((drafts, step) => {
    const height = ((drafts + 1) / most) * canvas.height;
    context.fillStyle = heat(drafts / Math.max(1, most - 1), 1);
    context.fillRect(step * width, canvas.height - height, Math.max(1, width - 1), height);
  });
}

function showNumbers(statistics, started) {
  const image = statistics.images[0];
  element("rate").textContent = image.tokens_per_forward === null ? "–" : image.tokens_per_forward.toFixed(2);
  element("forwards").textContent = image.forwards ?? "–";
  element("tokens").textContent = image.tokens;
  element("used-seed").textContent = image.seed;
  showClock(started);
}

function showClock(started) {
  element("seconds").textContent = ((performance.now() - started) / 1000).toFixed(1);
}

async function showCompleted(event, started) {
  const statistics = event.sjd_pac;
  await showPicture(event);
  const grid = { rows: statistics.rows, columns: statistics.columns, rowLength: statistics.row_length };
  const accepted = statistics.images[0].accepted;
  if (accepted) {
    showMap(accepted, grid);
    showSteps(accepted);
  }
  showNumbers(statistics, started);
  element("caption").textContent = event.revised_prompt ? `Understood: ${event.revised_prompt}` : "Done.";
  element("message").textContent = statistics.warnings.join("; ");
}

async function draw(submit) {
  submit.preventDefault();
  const button = element("draw");
  button.disabled = true;
  element("message").textContent = "";
  element("caption").textContent = "Drawing …";
  document.body.dataset.state = "drawing";
  document.body.dataset.partials = "0";
  const started = performance.now();
  try {
    const response = await fetch("/v1/images/generations", {
      method: "POST",
      headers: requestHeaders(),
      body: JSON.stringify(requestBody()),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of readEvents(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.type === "image_generation.partial_image") {
        await showPicture(event);
        element("tokens").textContent = event.sjd_pac.tokens;
        element("caption").textContent = `${event.sjd_pac.rows} rows`;
        document.body.dataset.partials = String(Number(document.body.dataset.partials) + 1);
        showClock(started);
      } else {
        await showCompleted(event, started);
      }
    }
    document.body.dataset.state = "done";
  } catch (error) {
    element("message").textContent = error.message;
    element("caption").textContent = "";
    document.body.dataset.state = "failed";
  } finally {
    button.disabled = false;
  }
}

function showScale() {
  const canvas = element("scale");
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x += 1) {
    context.fillStyle = heat(x / (canvas.width - 1), 1);
    context.fillRect(x, 0, 1, canvas.height);
  }
}

async function showModel() {
  const about = await (await fetch("/sjd-pac/about.json")).json();
  element("guidance").placeholder = about.defaults.guidance_scale;
  element("temperature").placeholder = about.defaults.temperature;
  if (about.known_words.length) element("words").textContent = `This model knows: ${about.known_words.join(", ")}.`;
  const examples = element("examples");
  examples.replaceChildren();
  for (const text of about.examples.filter((_, index) => index % 4 === 0).slice(0, 6)) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => {
      element("prompt").value = text;
      element("form").requestSubmit();
    });
    examples.append(button);
  }
  if (!element("prompt").value) element("prompt").value = about.examples[0] ?? "";
}

element("form").addEventListener("submit", draw);
showScale();
showModel();
