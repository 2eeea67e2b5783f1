/* A button at each block of code, which copies the text of the block. */
document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return; // pages from an insecure host
  for (const block of document.querySelectorAll("article .highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").textContent);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});
